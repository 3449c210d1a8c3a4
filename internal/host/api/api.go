// Package api serves a host: its HTTP API on a unix socket, and LULL_SOCKET, on
// which programs report on themselves. It translates requests into calls of the
// host, and errors into problem documents. It decides nothing.
package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"github.com/danielgtaylor/huma/v2/sse"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/policy/when"
	"lull/internal/host"
	"lull/internal/lib/httpx"
	"lull/internal/lib/humax"
	"lull/internal/protocol/hostctl"
	"lull/internal/protocol/hostctl/execstream"
)

// maxBody bounds the size of a request body, in bytes.
const maxBody = 1 << 20

// API serves a host over HTTP.
type API struct {
	Host    *host.Host
	Version string
	Status  func() hostctl.Status // the daemon's status
	Metrics http.Handler          // serves /metrics; if nil, there is no such endpoint
	// Link returns a link that signs user in to the dashboard once, or why no
	// dashboard is served.
	Link func(ctx context.Context, user string) (hostctl.Link, error)
}

// Handler returns the HTTP API and its OpenAPI document.
func (a *API) Handler() (http.Handler, huma.API) {
	mux := http.NewServeMux()
	cfg := humax.Config("lull host", a.Version)
	cfg.Info.Description = "Instances on one machine and their power states."
	cfg.DocsPath = ""
	// Durations are fractional seconds in JSON.
	cfg.Components.Schemas.RegisterTypeAlias(reflect.TypeFor[idle.Duration](), reflect.TypeFor[float64]())
	api := humago.New(mux, cfg)
	api.UseMiddleware(humax.Strict)
	a.reads(api)
	a.making(api)
	a.power(api)
	a.control(api)
	a.leases(api)
	a.adopted(api)
	a.images(api)
	a.stream(api, mux)
	whole := http.NewServeMux() // handlers whose request bodies may have any size
	a.files(whole)
	a.attach(mux)
	humax.NeverNull(api.OpenAPI())
	if a.Metrics != nil {
		mux.Handle("GET /metrics", a.Metrics)
	}
	whole.Handle("/", http.MaxBytesHandler(mux, maxBody))
	return whole, api
}

// Named is the name or ID of an instance in a request's path.
type Named struct {
	Name string `path:"name" maxLength:"63" doc:"Name or id of an instance"`
}

type answer[T any] struct{ Body T }

func operation(id, method, path, summary string) huma.Operation {
	return huma.Operation{OperationID: id, Method: method, Path: "/api/v1" + path, Summary: summary, MaxBodyBytes: maxBody}
}

// problem converts an error of the host into a problem document.
func problem(err error) error {
	if err == nil {
		return nil
	}
	var refused *host.RefusedError
	var missing *host.NotFoundError
	var invalid *host.InvalidError
	var busy *host.BusyError
	var full *instance.NoRoomError
	switch {
	case errors.As(err, &busy):
		return huma.NewError(http.StatusServiceUnavailable, err.Error())
	case errors.As(err, &refused):
		var details []error
		for _, b := range refused.Blocks {
			details = append(details, &huma.ErrorDetail{Message: b.Sentence, Location: string(b.Code)})
		}
		return huma.NewError(http.StatusConflict, err.Error(), details...)
	case errors.As(err, &full):
		return huma.NewError(http.StatusConflict, err.Error())
	case errors.As(err, &missing):
		return huma.NewError(http.StatusNotFound, err.Error())
	case errors.As(err, &invalid):
		return huma.NewError(http.StatusUnprocessableEntity, err.Error())
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return huma.NewError(http.StatusGatewayTimeout, err.Error())
	}
	return huma.NewError(http.StatusInternalServerError, err.Error())
}

func (a *API) reads(api huma.API) {
	huma.Register(api, operation("status", "GET", "/status", "The host daemon's own state"),
		func(context.Context, *struct{}) (*answer[hostctl.Status], error) {
			return &answer[hostctl.Status]{a.Status()}, nil
		})
	huma.Register(api, operation("list-instances", "GET", "/instances", "Every instance, by id"),
		func(_ context.Context, in *struct {
			Memory bool `query:"memory" doc:"Include each instance's memory, which costs a probe of each"`
		}) (*answer[[]hostctl.Instance], error) {
			return &answer[[]hostctl.Instance]{a.Host.List(in.Memory)}, nil
		})
	huma.Register(api, operation("get-instance", "GET", "/instances/{name}", "One instance"),
		func(_ context.Context, in *Named) (*answer[hostctl.Instance], error) {
			o, err := a.Host.Get(in.Name)
			return &answer[hostctl.Instance]{o}, problem(err)
		})
	huma.Register(api, operation("why", "GET", "/instances/{name}/why", "Why it runs, or why it was paused or stopped"),
		func(ctx context.Context, in *struct {
			Named
			At string `query:"at" maxLength:"80" doc:"A past time that is recorded: RFC 3339, how long ago (2h), 18:00, fri 18:00 or 2006-01-02 15:04, in the host's zone or with one behind it; default now"`
		}) (*answer[hostctl.Why], error) {
			at, err := when.Bound(time.Now(), in.At)
			if err != nil {
				return nil, invalid(err)
			}
			y, err := a.Host.Why(ctx, in.Name, at)
			return &answer[hostctl.Why]{y}, problem(err)
		})
}

// adopted registers the requests about programs that lull did not start.
func (a *API) adopted(api huma.API) {
	changes(a, api, created("adopt", "/adopted", "Make an instance of what runs already; 409 with the reason if it must not be frozen"),
		func(ctx context.Context, in *struct{ Body hostctl.Adopt }) (id string, err error) {
			err = a.Host.Complete(ctx, func(ctx context.Context) (err error) {
				id, err = a.Host.AdoptProgram(ctx, in.Body)
				return err
			})
			return id, problem(err)
		})
	huma.Register(api, operation("show-drop-in", "POST", "/adopted/drop-in", "The drop-in that adopting a unit with drop_in would write; changes nothing"),
		func(ctx context.Context, in *struct{ Body hostctl.Adopt }) (*answer[instance.DropIn], error) {
			d, err := a.Host.PlanDropIn(ctx, in.Body)
			return &answer[instance.DropIn]{d}, problem(err)
		})
	huma.Register(api, operation("list-adopted", "GET", "/adopted", "Instances that lull did not start, by id"),
		func(context.Context, *struct{}) (*answer[[]hostctl.Instance], error) {
			return &answer[[]hostctl.Instance]{a.Host.ListAdopted()}, nil
		})
	huma.Register(api, operation("release-adopted", "DELETE", "/adopted/{name}", "Thaw an adopted program and forget it"),
		func(ctx context.Context, in *Named) (*struct{}, error) {
			return nil, problem(a.Host.Complete(ctx, func(ctx context.Context) error { return a.Host.ReleaseProgram(ctx, in.Name, host.ByManual) }))
		})
}

func (a *API) images(api huma.API) {
	huma.Register(api, operation("list-images", "GET", "/images", "Cached images, the largest first"),
		func(ctx context.Context, _ *struct{}) (*answer[[]hostctl.Image], error) {
			l, err := a.Host.Images().List(ctx)
			return &answer[[]hostctl.Image]{l}, problem(err)
		})
	huma.Register(api, operation("prune-images", "POST", "/images/prune", "Remove unused images"),
		func(ctx context.Context, in *struct {
			Body struct {
				Older float64 `json:"older_seconds" minimum:"0" maximum:"1e9" required:"false" doc:"Only those created longer ago"`
			}
		}) (*answer[[]hostctl.Image], error) {
			var before time.Time
			if in.Body.Older > 0 {
				before = time.Now().Add(-time.Duration(in.Body.Older * float64(time.Second)))
			}
			l, err := a.Host.Images().Prune(ctx, before)
			return &answer[[]hostctl.Image]{l}, problem(err)
		})
}

func (a *API) leases(api huma.API) {
	list := func(name string) (*answer[[]idle.Lease], error) {
		o, err := a.Host.Get(name)
		return &answer[[]idle.Lease]{o.Leases}, problem(err)
	}
	huma.Register(api, operation("list-leases", "GET", "/instances/{name}/leases", "Leases that are held"),
		func(_ context.Context, in *Named) (*answer[[]idle.Lease], error) { return list(in.Name) })
	huma.Register(api, operation("hold-lease", "POST", "/instances/{name}/leases", "Take or renew a lease"),
		func(ctx context.Context, in *struct {
			Named
			Body hostctl.LeaseRequest
		}) (*answer[[]idle.Lease], error) {
			l := idle.Lease{Holder: in.Body.Holder, Reason: in.Body.Reason}
			if err := a.Host.Hold(ctx, in.Name, l, time.Duration(in.Body.TTL)); err != nil {
				return nil, problem(err)
			}
			return list(in.Name)
		})
	huma.Register(api, operation("release-lease", "DELETE", "/instances/{name}/leases/{holder}", "Drop one holder's lease"),
		func(ctx context.Context, in *struct {
			Named
			Holder string `path:"holder" maxLength:"128"`
		}) (*answer[[]idle.Lease], error) {
			if err := a.Host.ReleaseLease(ctx, in.Name, in.Holder); err != nil {
				return nil, problem(err)
			}
			return list(in.Name)
		})
}

// stream registers the streaming endpoints: events and logs.
func (a *API) stream(api huma.API, mux *http.ServeMux) {
	op := operation("events", "GET", "/events", "Events as they happen; Last-Event-ID continues where a client left off")
	op.Middlewares = huma.Middlewares{func(hc huma.Context, next func(huma.Context)) {
		next(huma.WithValue(hc, streamKey{}, hc.BodyWriter()))
	}}
	sse.Register(api, op, map[string]any{"event": hostctl.Event{}, "reset": hostctl.Reset{}},
		func(ctx context.Context, in *followed, send sse.Sender) {
			if beginStream(ctx) != nil {
				return
			}
			seq, unknown := a.Host.Events().From(cmp.Or(in.Last, in.Since))
			for {
				evs, gone, more := a.Host.Events().Since(seq)
				gone, unknown = gone || unknown, false
				if gone && send(sse.Message{ID: int(seq), Data: hostctl.Reset{Reason: "some events are no longer kept"}}) != nil {
					return
				}
				for _, e := range evs {
					if send(sse.Message{ID: int(e.Seq), Data: e}) != nil {
						return
					}
					seq = e.Seq
				}
				if in.Kept {
					return
				}
				select {
				case <-more:
				case <-ctx.Done():
					return
				}
			}
		})
	mux.HandleFunc("GET /api/v1/instances/{name}/logs", func(w http.ResponseWriter, r *http.Request) {
		refuse := func(status int, code, sentence string) {
			httpx.WriteProblem(w, httpx.NewProblem(status, code, sentence))
		}
		id, err := a.Host.IDOf(r.PathValue("name"))
		if err != nil {
			refuse(http.StatusNotFound, "not_found", err.Error())
			return
		}
		l, err := logsOf(r.URL.RawQuery)
		if err != nil {
			refuse(http.StatusUnprocessableEntity, "invalid", err.Error())
			return
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		err = a.Host.Logs(r.Context(), w, id, l)
		var refused *host.RefusedError
		if errors.As(err, &refused) {
			refuse(http.StatusConflict, "refused", err.Error())
		} else if err != nil {
			refuse(http.StatusInternalServerError, "internal", err.Error())
		}
	})
}

// files serves the files of instances as tar streams.
func (a *API) files(mux *http.ServeMux) {
	at := func(w http.ResponseWriter, r *http.Request) string {
		path := r.URL.Query().Get("path")
		if path == "" || len(path) > 4096 || strings.ContainsRune(path, 0) {
			httpx.WriteProblem(w, httpx.NewProblem(http.StatusUnprocessableEntity, "invalid", "cannot use query.path: want a path of 1 to 4096 bytes"))
			return ""
		}
		return path
	}
	refuse := func(w http.ResponseWriter, err error) {
		p, ok := problem(err).(huma.StatusError)
		if !ok {
			p = huma.NewError(http.StatusInternalServerError, err.Error())
		}
		httpx.WriteProblem(w, httpx.NewProblem(p.GetStatus(), "files", err.Error()))
	}
	mux.HandleFunc("GET /api/v1/instances/{name}/files", func(w http.ResponseWriter, r *http.Request) {
		path := at(w, r)
		if path == "" {
			return
		}
		w.Header().Set("Content-Type", "application/x-tar")
		switch begun, err := a.Host.ReadFiles(r.Context(), w, r.PathValue("name"), path); {
		case err != nil && begun:
			panic(http.ErrAbortHandler) // makes the client see that the stream is incomplete
		case err != nil:
			refuse(w, err)
		}
	})
	mux.HandleFunc("PUT /api/v1/instances/{name}/files", func(w http.ResponseWriter, r *http.Request) {
		path := at(w, r)
		if path == "" {
			return
		}
		if err := a.Host.WriteFiles(r.Context(), r.Body, r.PathValue("name"), path); err != nil {
			refuse(w, err)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
}

// attach serves commands with streams between the command and the client.
func (a *API) attach(mux *http.ServeMux) {
	mux.HandleFunc("POST /api/v1/instances/{name}/exec/stream", func(w http.ResponseWriter, r *http.Request) {
		refuse := func(err error) {
			p, ok := problem(err).(huma.StatusError)
			if !ok {
				p = huma.NewError(http.StatusInternalServerError, err.Error())
			}
			httpx.WriteProblem(w, httpx.NewProblem(p.GetStatus(), "exec", err.Error()))
		}
		if r.Header.Get("Upgrade") != execstream.Protocol {
			httpx.WriteProblem(w, httpx.NewProblem(http.StatusUpgradeRequired, "upgrade", "cannot stream a command: want the header Upgrade: "+execstream.Protocol))
			return
		}
		var q execstream.Request
		in := json.NewDecoder(r.Body)
		in.DisallowUnknownFields()
		if err := in.Decode(&q); err != nil {
			refuse(&host.InvalidError{Err: fmt.Errorf("cannot read the command: %w", err)})
			return
		}
		_, _ = io.Copy(io.Discard, r.Body) // Hijack requires that the body has been read
		begun := false
		err := a.Host.Attach(r.Context(), r.PathValue("name"), q.Command, func(run host.Run) error {
			c, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return err
			}
			begun = true
			defer c.Close()
			if err := c.SetDeadline(time.Time{}); err != nil {
				return err
			}
			if _, err := fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", execstream.Protocol); err != nil {
				return err
			}
			return execstream.Serve(context.WithoutCancel(r.Context()), c, q, run)
		})
		if err != nil && !begun {
			refuse(err)
		}
	})
}

// followed holds the parameters of a request for the event stream.
type followed struct {
	Last  string `header:"Last-Event-ID" maxLength:"20"`
	Since string `query:"since" maxLength:"20" doc:"now, or a sequence number; default: all retained events, the newest 4096, including those from before a daemon restart. If the number is no longer retained, a reset comes first, then all retained events"`
	Kept  bool   `query:"kept" doc:"Return only retained events and end before new ones"`
}

// Resolve returns an error for an invalid position in the stream.
func (f *followed) Resolve(huma.Context) (faults []error) {
	for where, text := range map[string]string{"header.Last-Event-ID": f.Last, "query.since": f.Since} {
		if _, err := strconv.ParseUint(text, 10, 64); err != nil && text != "" && text != "now" {
			faults = append(faults, &huma.ErrorDetail{Message: "want now or a sequence number", Location: where, Value: text})
		}
	}
	return faults
}

// logsOf parses the query of a log request.
func logsOf(query string) (hostctl.Logs, error) {
	l := hostctl.Logs{Tail: -1}
	q, err := url.ParseQuery(query)
	if err != nil {
		return l, fmt.Errorf("cannot read the query: %w", err)
	}
	for name, values := range q {
		v := values[len(values)-1]
		switch name {
		case "follow":
			l.Follow, err = strconv.ParseBool(v)
		case "console":
			l.Console, err = strconv.ParseBool(v)
		case "timestamps":
			l.Times, err = strconv.ParseBool(v)
		case "since":
			l.Since, err = when.Bound(time.Now(), v)
		case "until":
			l.Until, err = when.Bound(time.Now(), v)
		case "tail":
			if l.Tail, err = strconv.Atoi(v); err == nil && l.Tail < 0 {
				err = errors.New("negative")
			}
		default:
			return l, fmt.Errorf("cannot use the query parameter %.40q: logs take follow, console, since, tail, timestamps and until", name)
		}
		if err != nil || len(values) > 1 {
			return l, fmt.Errorf("cannot use the query parameter %s: want one value: true or false, a number of lines for tail, a time for since and until", name)
		}
	}
	if l.Follow && !l.Until.IsZero() {
		return l, errors.New("cannot use the query parameter until with follow: a followed log has no end")
	}
	return l, nil
}

// streamKey is the context key for the response writer of a stream.
type streamKey struct{}

// beginStream sends the response header and a comment line, so that the client sees
// that the stream is open. The first event may take hours.
func beginStream(ctx context.Context) error {
	w, ok := ctx.Value(streamKey{}).(http.ResponseWriter)
	if !ok {
		return nil
	}
	if _, err := io.WriteString(w, ": events\n\n"); err != nil {
		return err
	}
	return http.NewResponseController(w).Flush()
}

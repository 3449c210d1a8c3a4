package peers

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"lull/internal/core/evidence"
)

// Journal reads the evidence stored by one server.
type Journal interface {
	Read(ctx context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error)
}

var _ Journal = (*Peers)(nil)

// evidencePath is the path of other servers' requests for evidence. The answer is a
// sequence of frames, each a length and a packed record. An empty frame follows, then
// the list of what is missing, as JSON. An answer without that end was truncated.
const (
	evidencePath = "/internal/evidence"
	maxFrame     = evidence.MaxRecord
)

// connectWithin limits how long a peer may take to begin its answer.
const connectWithin = 5 * time.Second

// source is the evidence of one server as it arrives.
type source struct {
	server  string
	records chan evidence.Record
	head    *evidence.Record
	missing []evidence.Missing // valid once records is closed
	reached time.Time          // time of the last record
}

// Read yields the evidence of all live servers in order of time. For a server that
// does not answer completely, it returns the time range whose records are missing.
func (p *Peers) Read(ctx context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var all []*source
	begin := func(server string, read func(context.Context, evidence.Query, func(evidence.Record) error) ([]evidence.Missing, error)) {
		s := &source{server: server, records: make(chan evidence.Record, 64)}
		all = append(all, s)
		go func() {
			defer close(s.records)
			missing, err := read(ctx, q, func(r evidence.Record) error {
				select {
				case s.records <- r:
					s.reached = r.At
					return nil
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			})
			for i := range missing {
				missing[i].Server = server
			}
			if err != nil {
				from := q.From
				if s.reached.After(from) {
					from = s.reached
				}
				missing = append(missing, evidence.Missing{From: from, To: q.To, Server: server, Why: err.Error()})
			}
			s.missing = missing
		}()
	}
	if p.cfg.Journal != nil {
		begin(p.cfg.Server, p.cfg.Journal.Read)
	}
	p.mu.Lock()
	secret := p.secret
	for server, u := range p.others {
		begin(server, func(ctx context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error) {
			return p.fetch(ctx, u, secret, q, yield)
		})
	}
	p.mu.Unlock()
	for {
		var next *source
		for _, s := range all {
			if s.head == nil {
				if r, ok := <-s.records; ok {
					s.head = &r
				}
			}
			if s.head != nil && (next == nil || s.head.At.Before(next.head.At)) {
				next = s
			}
		}
		if next == nil {
			break
		}
		if err := yield(*next.head); err != nil {
			return nil, err
		}
		next.head = nil
	}
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	var missing []evidence.Missing
	for _, s := range all {
		missing = append(missing, s.missing...)
	}
	return missing, nil
}

func (p *Peers) fetch(ctx context.Context, base, secret string, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	v := url.Values{"object": {q.Object}, "from": {stamp(q.From)}, "to": {stamp(q.To)}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(base, "/")+evidencePath+"?"+v.Encode(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+secret)
	late := time.AfterFunc(connectWithin, cancel)
	res, err := p.cfg.HTTP.Do(req)
	p.reached(ctx, base, err)
	if err != nil {
		return nil, fmt.Errorf("cannot ask the server: %w", err)
	}
	defer res.Body.Close()
	late.Stop()
	if res.StatusCode != http.StatusOK {
		return nil, errors.New("cannot use the answer of the server: " + res.Status)
	}
	in := bufio.NewReader(res.Body)
	for {
		n, err := binary.ReadUvarint(in)
		if err != nil || n > maxFrame {
			return nil, fmt.Errorf("cannot read the answer of the server to its end: %w", errors.Join(err, io.ErrUnexpectedEOF))
		}
		if n == 0 {
			break
		}
		b := make([]byte, n)
		if _, err := io.ReadFull(in, b); err != nil {
			return nil, fmt.Errorf("cannot read the answer of the server to its end: %w", err)
		}
		r, err := evidence.Unpack(b)
		if err != nil {
			return nil, err
		}
		if err := yield(r); err != nil {
			return nil, err
		}
	}
	var missing []evidence.Missing
	if err := json.NewDecoder(io.LimitReader(in, maxAnswer)).Decode(&missing); err != nil {
		return nil, fmt.Errorf("cannot read the answer of the server to its end: %w", err)
	}
	return missing, nil
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

// serveEvidence sends this server's evidence to another server.
func (p *Peers) serveEvidence(w http.ResponseWriter, r *http.Request) {
	if !p.known(r) {
		http.Error(w, "cannot accept the secret", http.StatusUnauthorized)
		return
	}
	q := evidence.Query{Object: r.FormValue("object")}
	for name, to := range map[string]*time.Time{"from": &q.From, "to": &q.To} {
		if s := r.FormValue(name); s != "" {
			t, err := time.Parse(time.RFC3339Nano, s)
			if err != nil {
				http.Error(w, "cannot read "+name, http.StatusUnprocessableEntity)
				return
			}
			*to = t
		}
	}
	if p.cfg.Journal == nil {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	out := bufio.NewWriter(w)
	missing, err := p.cfg.Journal.Read(r.Context(), q, func(rec evidence.Record) error {
		b, err := rec.Pack()
		if err != nil {
			return err
		}
		if _, err := out.Write(binary.AppendUvarint(nil, uint64(len(b)))); err != nil {
			return err
		}
		_, err = out.Write(b)
		return err
	})
	if err != nil {
		_ = out.Flush()             // the records so far
		panic(http.ErrAbortHandler) // a truncated response must not look complete
	}
	if err := out.WriteByte(0); err == nil {
		_ = json.NewEncoder(out).Encode(missing) // if this fails, the reader times out
	}
	_ = out.Flush()
}

// Package activity takes readings of the probes that users define: the exit code
// of a command, an HTTP answer, a Prometheus metric, the age of a file, and the
// status that some servers report in their own protocol.
//
// A reading is active or quiet only if the probe answered completely and in time.
// Everything else is unknown, with its cause: a timeout, an error, a redirect, an
// answer that is too large or cannot be read, a missing program. Every probe is
// bounded: in time by its timeout, in output and answers by the limits below. At
// the timeout, the probe's command and the processes it started are killed.
//
// A process that left the probe's process group, cleared its environment and lost
// its parent is not found and survives the kill.
package activity

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
)

// Limits on what is read from one probe.
const (
	maxOutput     = 1 << 20 // bytes that a command may print
	maxJSON       = 1 << 20 // bytes of an answer with JSON
	maxExposition = 8 << 20 // bytes of a Prometheus exposition
)

// Reading is the result of a probe.
type Reading struct {
	State     idle.State // Active, Quiet or Unknown
	Value     float64
	Threshold float64
	Detail    string // what was seen, and which values would be active or quiet
}

func unknown(format string, args ...any) Reading {
	return Reading{Detail: fmt.Sprintf(format, args...)}
}

// judged returns an active or a quiet reading.
func judged(active bool, format string, args ...any) Reading {
	r := Reading{State: idle.Quiet, Detail: fmt.Sprintf(format, args...)}
	if active {
		r.State, r.Value = idle.Active, 1
	}
	return r
}

// Read takes a reading of a valid probe on this machine. env is added to the
// environment of a command. It returns within the probe's timeout or soon after
// ctx ends, unless the kernel does not let a killed command or a read of a file
// end: callers must not wait for it without a limit of their own.
func Read(ctx context.Context, p *instance.Probe, env []string) Reading {
	ctx, cancel := context.WithTimeout(ctx, p.Limit())
	defer cancel()
	switch p.Kind {
	case instance.ProbeExec:
		return command(ctx, p, env)
	case instance.ProbeHTTP:
		return web(ctx, p)
	case instance.ProbePrometheus:
		return metric(ctx, p)
	case instance.ProbeFile:
		return file(p, time.Now())
	case instance.ProbeJupyter:
		return jupyter(ctx, p)
	case instance.ProbeMinecraft:
		return talk(ctx, p, minecraft)
	case instance.ProbeBeanstalkd:
		return talk(ctx, p, beanstalkd)
	}
	return unknown("unknown kind of probe %q", p.Kind)
}

// Exited returns the reading that the exit code of a probe's command stands for.
func Exited(code int, printed string) Reading {
	switch code {
	case 0:
		return judged(true, "exit code 0 (active; 1 would be quiet)")
	case 1:
		return judged(false, "exit code 1 (quiet; 0 would be active)")
	}
	if printed = firstLine(printed); printed != "" {
		printed = ": " + printed
	}
	return unknown("exit code %d is neither 0 (active) nor 1 (quiet)%s", code, printed)
}

// firstLine returns the beginning of a program's first line of output, to be
// quoted in a message.
func firstLine(s string) string {
	s, _, _ = strings.Cut(strings.TrimSpace(s), "\n")
	s = strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	if len(s) > 120 {
		s = strings.ToValidUTF8(s[:120], "") + "..."
	}
	return s
}

// Late returns the reading of a probe that did not answer within its timeout.
func Late(p *instance.Probe) Reading {
	return unknown("no answer within its timeout of %s", idle.Human(p.Limit()))
}

// failed returns the reading of a probe that failed with err. A timeout is
// described as one.
func failed(ctx context.Context, p *instance.Probe, err error) Reading {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return Late(p)
	}
	if ctx.Err() != nil {
		return unknown("the reading was canceled")
	}
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	return unknown("%s", firstLine(err.Error()))
}

const bearer = "Bearer" // the usual scheme of a token

// maxToken bounds a file with a token, in bytes.
const maxToken = 4 << 10

// token returns the first line of a probe's token file; "" without one.
func token(p *instance.Probe) (string, error) {
	if p.TokenFile == "" {
		return "", nil
	}
	f, err := os.OpenFile(p.TokenFile, os.O_RDONLY|syscall.O_NONBLOCK, 0) // O_NONBLOCK: opening a named pipe must not block
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxToken))
	if err != nil {
		return "", err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	if line = strings.TrimSpace(line); line == "" || strings.ContainsFunc(line, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fmt.Errorf("the first line of %s is not a token", p.TokenFile)
	}
	return line, nil
}

// get fetches a URL for a probe, without following redirects, and returns at most
// limit bytes of the body. scheme precedes the token, if the probe has one.
func get(ctx context.Context, p *instance.Probe, address, scheme string, limit int64) (status int, body []byte, err error) {
	secret, err := token(p)
	if err != nil {
		return 0, nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return 0, nil, err
	}
	if secret != "" {
		req.Header.Set("Authorization", scheme+" "+secret)
	}
	req.Header.Set("User-Agent", "lull-probe")
	t := &http.Transport{DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: 64 << 10, DialContext: (&net.Dialer{}).DialContext}
	c := &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := c.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err == nil && int64(len(body)) > limit {
		err = fmt.Errorf("the answer has more than %d bytes", limit)
	}
	return resp.StatusCode, body, err
}

func web(ctx context.Context, p *instance.Probe) Reading {
	status, body, err := get(ctx, p, p.URL, bearer, maxJSON)
	if err != nil {
		return failed(ctx, p, err)
	}
	switch {
	case p.Field == "" && (status == http.StatusOK || status == http.StatusNoContent):
		return judged(status == http.StatusOK, "status %d (200 is active, 204 quiet)", status)
	case p.Field == "":
		return unknown("status %d is neither 200 (active) nor 204 (quiet)", status)
	case status < 200 || status > 299:
		return unknown("status %d", status)
	}
	return jsonField(body, p.Field)
}

// jsonField judges the field at path of a JSON document. The path "." means the
// whole document.
func jsonField(body []byte, path string) Reading {
	d := json.NewDecoder(strings.NewReader(string(body)))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return unknown("the answer is not JSON")
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return unknown("the answer is not one JSON value")
	}
	if path == "." {
		return jsonValue("the answer", v)
	}
	for name := range strings.SplitSeq(path, ".") {
		switch in := v.(type) {
		case map[string]any:
			next, has := in[name]
			if !has {
				return unknown("the answer has no field %s", path)
			}
			v = next
		case []any:
			n, err := strconv.ParseUint(name, 10, 31)
			if err != nil || n >= uint64(len(in)) {
				return unknown("the answer has no field %s", path)
			}
			v = in[n]
		default:
			return unknown("the answer has no field %s", path)
		}
	}
	return jsonValue(path, v)
}

// jsonValue judges a value: true, a number other than zero, and a string, list or
// object that is not empty are active.
func jsonValue(path string, v any) Reading {
	const rule = "false, 0, null and empty are quiet"
	switch v := v.(type) {
	case nil:
		return judged(false, "%s is null; true or a number above 0 would be active", path)
	case bool:
		return judged(v, "%s is %t (%s)", path, v, rule)
	case json.Number:
		mantissa, _, _ := strings.Cut(strings.ToLower(v.String()), "e")
		r := judged(strings.ContainsAny(mantissa, "123456789"), "%s is %.40s (%s)", path, v, rule)
		if f, err := v.Float64(); err == nil {
			r.Value = f
		}
		return r
	case string:
		return judged(v != "", "%s is a string of %d bytes (%s)", path, len(v), rule)
	case []any:
		return judged(len(v) > 0, "%s has %d elements (%s)", path, len(v), rule)
	case map[string]any:
		return judged(len(v) > 0, "%s has %d fields (%s)", path, len(v), rule)
	}
	return unknown("%s has an unknown type", path)
}

func metric(ctx context.Context, p *instance.Probe) Reading {
	address := p.URL
	if p.Query != "" {
		address = strings.TrimRight(p.URL, "/") + "/api/v1/query?query=" + url.QueryEscape(p.Query)
	}
	status, body, err := get(ctx, p, address, bearer, maxExposition)
	var values []float64
	name := p.Metric
	switch {
	case err != nil:
		return failed(ctx, p, err)
	case status != http.StatusOK:
		return unknown("status %d", status)
	case p.Query != "":
		name = "the query"
		values, err = answer(body)
	default:
		values, err = exposed(body, p.Metric)
	}
	if err != nil {
		return unknown("%s", firstLine(err.Error()))
	}
	return largest(name, values, p.Threshold)
}

// largest judges the largest of several values against threshold.
func largest(name string, values []float64, threshold float64) Reading {
	if len(values) == 0 {
		return unknown("%s has no value", name)
	}
	most := math.Inf(-1)
	for _, v := range values {
		if math.IsNaN(v) {
			return unknown("%s is not a number", name)
		}
		most = max(most, v)
	}
	r := judged(most > threshold, "%s is %s (active above %s)", name, number(most), number(threshold))
	r.Value, r.Threshold = most, threshold
	if math.IsInf(most, 0) {
		r.Value = 0 // JSON has no such number
	}
	return r
}

func number(f float64) string { return strconv.FormatFloat(f, 'g', 6, 64) }

// exposed returns the values of the series that a selector matches in an
// exposition in Prometheus' text format.
func exposed(body []byte, selector string) (out []float64, err error) {
	s, err := instance.ParseSelector(selector)
	if err != nil {
		return nil, err
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(string(body)))
	if err != nil {
		return nil, fmt.Errorf("the answer is not a Prometheus exposition: %w", err)
	}
	f := families[s.Name]
	if f == nil {
		return nil, nil
	}
	for _, m := range f.GetMetric() {
		if !matches(m, s.Labels) {
			continue
		}
		switch {
		case m.Gauge != nil:
			out = append(out, m.Gauge.GetValue())
		case m.Counter != nil:
			out = append(out, m.Counter.GetValue())
		case m.Untyped != nil:
			out = append(out, m.Untyped.GetValue())
		default:
			return nil, fmt.Errorf("%s is neither a gauge nor a counter", s.Name)
		}
	}
	return out, nil
}

func matches(m *dto.Metric, labels map[string]string) bool {
	have := map[string]string{}
	for _, l := range m.GetLabel() {
		have[l.GetName()] = l.GetValue()
	}
	for k, v := range labels {
		if have[k] != v { // an absent label equals an empty one
			return false
		}
	}
	return true
}

// answer returns the values of an instant query's result.
func answer(body []byte) ([]float64, error) {
	var a struct {
		Status string
		Error  string
		Data   struct {
			ResultType string
			Result     json.RawMessage
		}
	}
	if err := json.Unmarshal(body, &a); err != nil || a.Status != "success" {
		return nil, fmt.Errorf("the server did not answer the query: %s", firstLine(a.Error))
	}
	var samples [][]any
	switch a.Data.ResultType {
	case "vector":
		var series []struct{ Value []any }
		if err := json.Unmarshal(a.Data.Result, &series); err != nil {
			return nil, errors.New("the result of the query cannot be read")
		}
		for _, s := range series {
			samples = append(samples, s.Value)
		}
	case "scalar":
		samples = make([][]any, 1)
		if err := json.Unmarshal(a.Data.Result, &samples[0]); err != nil {
			return nil, errors.New("the result of the query cannot be read")
		}
	default:
		return nil, fmt.Errorf("the result of the query is a %q, not a vector or a scalar", firstLine(a.Data.ResultType))
	}
	out := make([]float64, 0, len(samples))
	for _, s := range samples {
		if len(s) != 2 {
			return nil, errors.New("the result of the query cannot be read")
		}
		text, _ := s[1].(string)
		f, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return nil, errors.New("the result of the query cannot be read")
		}
		out = append(out, f)
	}
	return out, nil
}

// file judges the time of a file's last modification. A time in the future counts
// as now.
func file(p *instance.Probe, now time.Time) Reading {
	st, err := os.Stat(p.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && p.MissingIsQuiet:
		return judged(false, "%s does not exist, which this probe takes as quiet", p.Path)
	case errors.Is(err, fs.ErrNotExist):
		return unknown("%s does not exist", p.Path)
	case err != nil:
		return unknown("cannot read %s", firstLine(err.Error()))
	}
	age := now.Sub(st.ModTime())
	return judged(age <= p.Within(), "%s was modified %s ago (active within %s)", p.Path, idle.Human(max(age, 0)), idle.Human(p.Within()))
}

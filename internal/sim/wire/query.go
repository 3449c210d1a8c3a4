// Package wire contains what a server needs for AWS's query protocol: parsing
// numbered form parameters, finding who signed a request and for which region,
// and writing XML quickly.
//
// Input is limited in size and number of parameters; any other fault is an
// error that names the parameter. Signatures are not verified.
package wire

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// Limits of one request.
const (
	MaxBody   = 4 << 20
	maxParams = 20_000
	maxIndex  = 10_000
)

// Form contains the parameters of one query request.
type Form struct{ v url.Values }

// ParseForm reads the body of a query request, or the query string of a GET.
func ParseForm(r *http.Request) (Form, error) {
	text := r.URL.RawQuery
	if r.Method == http.MethodPost {
		b, err := io.ReadAll(io.LimitReader(r.Body, MaxBody+1))
		if err != nil {
			return Form{}, fmt.Errorf("cannot read request: %w", err)
		}
		if len(b) > MaxBody {
			return Form{}, fmt.Errorf("cannot read request: the body is larger than %d bytes", MaxBody)
		}
		if len(b) > 0 {
			text = string(b)
		}
	}
	return Parse(text)
}

// Parse reads an encoded form.
func Parse(text string) (Form, error) {
	if n := strings.Count(text, "&"); n > maxParams {
		return Form{}, fmt.Errorf("cannot read request: %d parameters are more than %d", n, maxParams)
	}
	v, err := url.ParseQuery(text)
	if err != nil {
		return Form{}, fmt.Errorf("cannot read request: %w", err)
	}
	return Form{v}, nil
}

// Get returns a parameter, or "".
func (f Form) Get(key string) string { return f.v.Get(key) }

// Has reports whether a parameter is present.
func (f Form) Has(key string) bool { return f.v.Has(key) }

// Int returns a number, or def if the parameter is absent.
func (f Form) Int(key string, def int) (int, error) {
	s := f.v.Get(key)
	if s == "" {
		return def, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		return 0, fmt.Errorf("cannot read parameter %s: %q is not a number", key, s)
	}
	return n, nil
}

// Bool returns a boolean, false if the parameter is absent.
func (f Form) Bool(key string) (bool, error) {
	switch s := strings.ToLower(f.v.Get(key)); s {
	case "", "false", "0":
		return false, nil
	case "true", "1":
		return true, nil
	default:
		return false, fmt.Errorf("cannot read parameter %s: %q is neither true nor false", key, s)
	}
}

// List returns key.1, key.2 and so on, up to the first missing one.
func (f Form) List(key string) []string {
	var out []string
	for k := 1; k <= maxIndex; k++ {
		v, ok := f.v[key+"."+strconv.Itoa(k)]
		if !ok {
			return out
		}
		out = append(out, v[0])
	}
	return out
}

// Groups returns the prefixes key.1., key.2. and so on of a list of structures, up to
// the first prefix without parameters.
func (f Form) Groups(key string) []string {
	have := map[string]bool{}
	for k := range f.v {
		rest, ok := strings.CutPrefix(k, key+".")
		if !ok {
			continue
		}
		if n, _, ok := strings.Cut(rest, "."); ok {
			have[n] = true
		}
	}
	var out []string
	for k := 1; k <= len(have); k++ {
		if !have[strconv.Itoa(k)] {
			break
		}
		out = append(out, key+"."+strconv.Itoa(k)+".")
	}
	return out
}

// Caller is the identity in a request's signature.
type Caller struct {
	Key, Session    string // access key and session token
	Region, Service string
}

// CallerOf returns the identity from the Authorization header or, for a presigned
// request, from the query.
func CallerOf(r *http.Request) Caller {
	c := Caller{Session: r.Header.Get("X-Amz-Security-Token")}
	cred := ""
	if auth := r.Header.Get("Authorization"); strings.HasPrefix(auth, "AWS4-HMAC-SHA256 ") {
		for part := range strings.SplitSeq(auth[len("AWS4-HMAC-SHA256 "):], ",") {
			if v, ok := strings.CutPrefix(strings.TrimSpace(part), "Credential="); ok {
				cred = v
			}
		}
	} else if q := r.URL.Query(); q.Get("X-Amz-Credential") != "" {
		cred = q.Get("X-Amz-Credential")
		c.Session = q.Get("X-Amz-Security-Token")
	}
	if p := strings.Split(cred, "/"); len(p) == 5 {
		c.Key, c.Region, c.Service = p[0], p[2], p[3]
	}
	return c
}

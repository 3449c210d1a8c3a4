package fault

import (
	"net/http"

	"lull/internal/lib/delay"
)

// Serve applies the effect around one call. refuse writes an error response in
// the protocol's format; next does the work and responds. To break the
// connection Serve panics with http.ErrAbortHandler, which makes a net/http
// server drop it.
func (e Effect) Serve(w http.ResponseWriter, r *http.Request, refuse func(http.ResponseWriter, Rule), next func(http.ResponseWriter)) {
	if e.Delay > 0 && delay.For(r.Context(), e.Delay) != nil {
		panic(http.ErrAbortHandler)
	}
	switch e.Rule.Kind {
	case Error:
		refuse(w, e.Rule)
	case Refuse:
		panic(http.ErrAbortHandler)
	case Hang:
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	case Lose:
		next(&void{header: http.Header{}})
		panic(http.ErrAbortHandler)
	case Truncate:
		cut := &cutter{ResponseWriter: w, left: e.Rule.Bytes}
		next(cut)
		cut.abort()
	case Malform:
		next(&spoiler{ResponseWriter: w, from: e.Rule.Bytes})
	default:
		next(w)
	}
}

// void discards a response.
type void struct{ header http.Header }

func (v *void) Header() http.Header         { return v.header }
func (v *void) Write(b []byte) (int, error) { return len(b), nil }
func (v *void) WriteHeader(int)             {}

// cutter forwards the first bytes of a response and then drops the connection.
type cutter struct {
	http.ResponseWriter
	left int
}

func (c *cutter) Write(b []byte) (int, error) {
	c.Header().Del("Content-Length")
	if len(b) < c.left {
		c.left -= len(b)
		return c.ResponseWriter.Write(b)
	}
	if _, err := c.ResponseWriter.Write(b[:c.left]); err != nil {
		return 0, err
	}
	c.abort()
	return 0, nil
}

// abort flushes what was written so far before it drops the connection, so that the
// client sees a truncated body rather than no response.
func (c *cutter) abort() {
	if f, ok := c.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
	panic(http.ErrAbortHandler)
}

// spoiler corrupts a response: it replaces the characters that structure JSON, XML
// and CBOR.
type spoiler struct {
	http.ResponseWriter
	from, seen int
}

func (s *spoiler) Write(b []byte) (int, error) {
	out := make([]byte, len(b))
	for i, c := range b {
		if s.seen+i >= s.from && (s.seen+i)%7 == 3 {
			c = 0xff
		}
		out[i] = c
	}
	s.seen += len(b)
	return s.ResponseWriter.Write(out)
}

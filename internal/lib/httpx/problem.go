package httpx

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
)

// codes is the prefix of a problem's type, before the code.
const codes = "urn:lull:problem:"

// Problem is an error response (RFC 9457), and an error.
type Problem struct {
	Type   string  `json:"type,omitempty"`
	Title  string  `json:"title"`
	Status int     `json:"status"`
	Detail string  `json:"detail"` // a sentence for users
	Errors []Fault `json:"errors,omitempty"`
}

// Fault is one fault of a request and its location, or one reason for a refusal
// and its code.
type Fault struct {
	Message  string `json:"message"`
	Location string `json:"location,omitempty"`
}

// NewProblem returns a problem with a status, a code for programs and a
// sentence for users.
func NewProblem(status int, code, sentence string) *Problem {
	return &Problem{Type: TypeOf(code), Title: http.StatusText(status), Status: status, Detail: sentence}
}

// TypeOf returns the type of a problem with a code.
func TypeOf(code string) string { return codes + code }

// Code returns the problem's code, for programs; "" if it has none.
func (p *Problem) Code() string {
	code, _ := strings.CutPrefix(p.Type, codes)
	return code
}

// Error returns the sentence, followed by the faults that it does not mention. A
// fault of the caller's input has its field.
func (p *Problem) Error() string {
	s := p.Detail
	if s == "" {
		s = p.Title
	}
	mistake := p.Status == http.StatusBadRequest || p.Status == http.StatusUnprocessableEntity
	for _, f := range p.Errors {
		if strings.Contains(s, f.Message) {
			continue
		}
		s += "\n  " + f.Message
		if mistake && f.Location != "" {
			s += " (" + f.Location + ")"
		}
	}
	return s
}

// GetStatus returns the HTTP status. With ContentType it lets a huma route
// return a Problem as an error.
func (p *Problem) GetStatus() int { return p.Status }

// ContentType returns the media type of a problem document.
func (p *Problem) ContentType(string) string { return "application/problem+json" }

// WriteProblem responds to a request with a problem.
func WriteProblem(w http.ResponseWriter, p *Problem) {
	body, err := json.Marshal(p)
	if err != nil {
		http.Error(w, p.Detail, p.Status)
		return
	}
	w.Header().Del("Content-Length")
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(p.Status)
	_, _ = w.Write(append(body, '\n')) // the client may have disconnected
}

// maxProblem bounds a problem that is read, in bytes.
const maxProblem = 1 << 20

// readProblem returns the error of an unsuccessful response, from any server.
func readProblem(res *http.Response) error {
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxProblem))
	p := &Problem{}
	if err != nil || json.Unmarshal(b, p) != nil || p.Detail == "" && p.Title == "" {
		text := string(b[:min(len(b), 200)])
		p = &Problem{Title: res.Status, Detail: strings.TrimSpace(res.Status + " " + strings.TrimSpace(text))}
	}
	p.Status = res.StatusCode
	return p
}

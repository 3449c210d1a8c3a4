package ec2

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
)

// fake answers EC2's query protocol with a function for each action, and records
// the requests.
type fake struct {
	*httptest.Server
	mu      sync.Mutex
	calls   []url.Values
	headers []http.Header
	actions map[string]func(url.Values) reply
}

// reply is a body with a status. If drop is set, the connection is closed without
// an answer.
type reply struct {
	status int
	body   string
	drop   bool
}

func newFake(t *testing.T, actions map[string]func(url.Values) reply) *fake {
	t.Helper()
	f := &fake{actions: actions}
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	return f
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := r.ParseForm(); err != nil {
		http.Error(w, err.Error(), 400)
		return
	}
	action := r.PostForm.Get("Action")
	f.mu.Lock()
	f.calls = append(f.calls, r.PostForm)
	f.headers = append(f.headers, r.Header)
	answer := f.actions[action]
	f.mu.Unlock()
	out := refusal("InvalidAction", "no such action "+action)
	if answer != nil {
		out = answer(r.PostForm)
	}
	if out.drop {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "text/xml")
	w.WriteHeader(out.status)
	fmt.Fprint(w, out.body)
}

// asked returns the recorded requests of an action.
func (f *fake) asked(action string) []url.Values {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []url.Values
	for _, c := range f.calls {
		if c.Get("Action") == action {
			out = append(out, c)
		}
	}
	return out
}

func fine(action, inner string) reply {
	return reply{status: 200, body: fmt.Sprintf(`<?xml version="1.0"?><%sResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r-1</requestId>%s</%sResponse>`, action, inner, action)}
}

func refusal(code, message string) reply {
	status := 400
	if code == "InternalError" || code == "RequestLimitExceeded" || code == "Unavailable" {
		status = 503
	}
	return reply{status: status, body: fmt.Sprintf(`<?xml version="1.0"?><Response><Errors><Error><Code>%s</Code><Message>%s</Message></Error></Errors><RequestID>r-1</RequestID></Response>`, code, message)}
}

// list returns the values of a numbered parameter: InstanceId.1, InstanceId.2,
// ...
func list(form url.Values, name string) []string {
	var out []string
	for i := 1; form.Has(fmt.Sprintf("%s.%d", name, i)); i++ {
		out = append(out, form.Get(fmt.Sprintf("%s.%d", name, i)))
	}
	return out
}

// filtersOf returns the filters of a request, by name.
func filtersOf(form url.Values) map[string][]string {
	out := map[string][]string{}
	for i := 1; form.Has(fmt.Sprintf("Filter.%d.Name", i)); i++ {
		out[form.Get(fmt.Sprintf("Filter.%d.Name", i))] = list(form, fmt.Sprintf("Filter.%d.Value", i))
	}
	return out
}

func items(parts ...string) string {
	var b strings.Builder
	for _, p := range parts {
		b.WriteString("<item>" + p + "</item>")
	}
	return b.String()
}

// id returns the nth instance id.
func id(n int) string { return fmt.Sprintf("i-%017x", n) }

func instanceXML(id, state, more string) string {
	return fmt.Sprintf(`<instanceId>%s</instanceId><instanceState><code>16</code><name>%s</name></instanceState>%s`, id, state, more)
}

func reservations(instances ...string) string {
	return "<reservationSet><item><instancesSet>" + items(instances...) + "</instancesSet></item></reservationSet>"
}

var testLimits = Limits{ReadRate: 1e6, ReadBurst: 1e6, WriteRate: 1e6, WriteBurst: 1e6, Attempts: 3, MaxBackoff: time.Millisecond}

func (f *fake) client(t *testing.T, limits Limits) *Client {
	t.Helper()
	cfg, err := Access{Credentials: credentials.NewStaticCredentialsProvider("AKIATEST", "secret", ""), HTTP: f.Client()}.Load(t.Context(), "eu-test-1")
	if err != nil {
		t.Fatal(err)
	}
	return New(cfg, f.URL, limits)
}

func deadline(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

var _ aws.HTTPClient = bounded{}

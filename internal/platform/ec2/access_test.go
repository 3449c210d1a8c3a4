package ec2

import (
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/credentials"

	"lull/internal/lib/errtest"
)

func TestAssumeRole(t *testing.T) {
	refused := ""
	f := newFake(t, actions{
		"AssumeRole": func(v url.Values) reply {
			if v.Get("RoleArn") != "arn:aws:iam::1:role/lull" || v.Get("ExternalId") != "x" {
				return reply{status: 403, body: `<ErrorResponse><Error><Type>Sender</Type><Code>` + refused + `</Code><Message>no</Message></Error></ErrorResponse>`}
			}
			return reply{status: 200, body: `<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>
<AccessKeyId>ASIAROLE</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration>
</Credentials></AssumeRoleResult></AssumeRoleResponse>`}
		},
		"DescribeInstanceStatus": func(url.Values) reply { return statusPage(0, 1, "running", "") },
	})
	static := credentials.NewStaticCredentialsProvider("AKIATEST", "secret", "")
	s := &Set{Endpoint: f.URL, Limits: testLimits, Accounts: map[string]Access{
		"other": {RoleARN: "arn:aws:iam::1:role/lull", ExternalID: "x", Credentials: static, HTTP: f.Client(), STSEndpoint: f.URL},
		"wrong": {RoleARN: "arn:aws:iam::1:role/else", Credentials: static, HTTP: f.Client(), STSEndpoint: f.URL},
	}}
	c, err := s.Client(t.Context(), "other", "eu-test-1")
	errtest.None(t, err)
	errtest.Get(c.States(t.Context()))(t)
	signed := f.headers[len(f.headers)-1].Get("Authorization")
	if !strings.Contains(signed, "Credential=ASIAROLE/") || !strings.Contains(signed, "/eu-test-1/ec2/") {
		t.Errorf("signed %s", signed)
	}
	if again, err := s.Client(t.Context(), "other", "eu-test-1"); again != c || err != nil {
		t.Errorf("a second client for the same account and region: %v", err)
	}
	if elsewhere, err := s.Client(t.Context(), "other", "eu-test-2"); elsewhere == c || err != nil || elsewhere.Region() != "eu-test-2" {
		t.Errorf("another region's client: %v", err)
	}
	wrong, err := s.Client(t.Context(), "wrong", "eu-test-1")
	errtest.None(t, err)
	for _, refused = range []string{"AccessDenied", "Novelty"} {
		if _, err := wrong.States(t.Context()); KindOf(err) != Unauthorized {
			t.Errorf("a role that may not be assumed: %v", err)
		}
	}
	if _, err := s.Client(t.Context(), "missing", "eu-test-1"); err == nil {
		t.Error("an account that is not configured has a client")
	}
	if _, err := s.Client(t.Context(), "other", ""); err == nil {
		t.Error("no region has a client")
	}
}

func TestBoundedAnswer(t *testing.T) {
	b := &boundedBody{io.NopCloser(strings.NewReader("0123456789")), 4}
	text, err := io.ReadAll(b)
	if string(text) != "0123" || err == nil {
		t.Errorf("read %q, %v", text, err)
	}
}

// trip is an HTTP transport that answers requests without a network.
type trip func() string

func (f trip) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(f())), Request: r}, nil
}

// FuzzAnswer gives any text as EC2's answer: no call may panic, and an instance
// that the text does not contain must not be found.
func FuzzAnswer(f *testing.F) {
	f.Add(statusPage(0, 2, "running", "").body)
	f.Add(fine("DescribeInstances", reservations(instanceXML(id(1), "stopped", "<ipAddress>1.2.3.4</ipAddress>"))).body)
	f.Add(refusal("InvalidInstanceID.NotFound", "The instance IDs 'i-00000000000000001' do not exist").body)
	f.Add("<a>")
	text := ""
	cfg, err := Access{Credentials: credentials.NewStaticCredentialsProvider("a", "b", ""), HTTP: &http.Client{Transport: trip(func() string { return text })}}.Load(f.Context(), "r")
	if err != nil {
		f.Fatal(err)
	}
	limits := testLimits
	limits.Attempts = 1
	c := New(cfg, "http://ec2.invalid", limits)
	f.Fuzz(func(t *testing.T, answer string) {
		text = answer
		if states, err := c.States(t.Context()); err == nil && states == nil {
			t.Error("neither states nor an error")
		}
		found, missing, err := c.Instances(t.Context(), []string{id(1)})
		if err == nil && !strings.Contains(answer, id(1)) && len(missing) != 1 {
			t.Errorf("found %v in an answer without it", found)
		}
		if _, err := c.NewestImage(t.Context(), "x", nil); err != nil && !errors.Is(err, ErrNoImage) && KindOf(err) == "" {
			t.Errorf("an error of another kind: %v", err)
		}
	})
}

// TestRequestBodyIsPlain checks that bounded passes on request bodies without
// io.WriterTo.
func TestRequestBodyIsPlain(t *testing.T) {
	var body io.Reader
	b := bounded{&http.Client{Transport: sent(func(r *http.Request) { body = r.Body })}}
	req, err := http.NewRequestWithContext(t.Context(), "POST", "http://ec2.invalid", io.NopCloser(strings.NewReader("x")))
	errtest.None(t, err)
	if _, ok := any(req.Body).(io.WriterTo); !ok {
		t.Fatal("the body made for the test is no WriterTo")
	}
	errtest.Get(b.Do(req))(t)
	if _, ok := body.(io.WriterTo); ok {
		t.Error("net/http sees a body that writes itself")
	}
}

type sent func(*http.Request)

func (f sent) RoundTrip(r *http.Request) (*http.Response, error) {
	f(r)
	return &http.Response{StatusCode: 200, Header: http.Header{}, Body: http.NoBody, Request: r}, nil
}

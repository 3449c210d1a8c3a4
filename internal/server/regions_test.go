package server_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"

	"lull/internal/server"
	"lull/internal/server/access"
	"lull/internal/store/mem"
)

// TestRegionThatTheAccountHasNot checks that a worker in a region that the account
// does not have is rejected with the field's name, and accepted if the cloud cannot
// be asked.
func TestRegionThatTheAccountHasNot(t *testing.T) {
	var fails error
	b := newBenchWith(t, mem.New(mem.Options{}).Client(), func(o *server.Options) {
		o.Regions = func(_ context.Context, account string) ([]string, error) {
			if account != "" {
				return nil, errors.New("not configured")
			}
			return []string{"us-east-1", "eu-north-1"}, fails
		}
	})
	ops := b.token(access.Admin, "")
	for _, c := range []struct {
		path, body string
		fails      error
		status     int
		says       string
	}{
		{"/import", `{"name":"a","aws_region":"eu-west-9","ec2_instance_id":"i-0123456789abcdef0"}`, nil, http.StatusUnprocessableEntity, `has no region \"eu-west-9\"`},
		{"", `{"name":"b","aws_region":"eu-west-9","template_name":"small"}`, nil, http.StatusUnprocessableEntity, `has no region \"eu-west-9\"`},
		{"/import", `{"name":"c","aws_region":"eu-north-1","ec2_instance_id":"i-0123456789abcdef1"}`, nil, http.StatusAccepted, ""},
		{"/import", `{"name":"d","aws_region":"eu-west-9","ec2_instance_id":"i-0123456789abcdef2"}`, errors.New("no way there"), http.StatusAccepted, ""},
		{"/import", `{"name":"e","aws_region":"europe","ec2_instance_id":"i-0123456789abcdef3"}`, errors.New("no way there"), http.StatusUnprocessableEntity, "aws_region"},
	} {
		fails = c.fails
		res, body := b.ask("POST", "/api/v1/workers"+c.path, ops, []byte(c.body))
		if res.StatusCode != c.status || !strings.Contains(string(body), c.says) || c.says != "" && !strings.Contains(string(body), "aws_region") {
			t.Errorf("%s: %d %s", c.body, res.StatusCode, body)
		}
	}
}

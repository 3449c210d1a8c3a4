package server_test

import (
	"net/http"
	"testing"

	"lull/internal/lib/httpx"
)

// TestFaultsOfWindows checks that a fault in a window names its field.
func TestFaultsOfWindows(t *testing.T) {
	api, token, _, _ := recordedWorker(t)
	b := &bench{t: t, url: api}
	for body, want := range map[string]string{
		`{"zone":"UTC","windows":[{"days":"daily","from":"9","to":"17:00"}]}`:                                                "body.windows[0].from",
		`{"zone":"UTC","windows":[{"days":"daily","from":"9:00","to":"17:00"},{"days":"daily","from":"9:00","to":"25:00"}]}`: "body.windows[1].to",
	} {
		res, data := b.ask("PUT", "/api/v1/schedules/office", token, []byte(body))
		p := decode[httpx.Problem](t, data)
		if res.StatusCode != http.StatusUnprocessableEntity || len(p.Errors) != 1 || p.Errors[0].Location != want {
			t.Errorf("%s: %d %s, want %s", body, res.StatusCode, data, want)
		}
	}
	for _, at := range []string{"9:00", "09:00", "0:00"} {
		if res, data := b.ask("PUT", "/api/v1/schedules/office", token, []byte(`{"zone":"UTC","windows":[{"days":"daily","from":"`+at+`","to":"24:00"}]}`)); res.StatusCode != http.StatusOK {
			t.Errorf("%s: %d %s", at, res.StatusCode, data)
		}
	}
}

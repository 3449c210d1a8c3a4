package humax_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"lull/internal/lib/errtest"
	"lull/internal/lib/humax"
	"lull/internal/lib/memnet"
)

// TestStalledBody checks that a client that announces a body and does not send it
// is answered immediately if the route takes no body, and after BodyTimeout
// otherwise.
func TestStalledBody(t *testing.T) {
	for name, c := range map[string]struct {
		request string
		status  int
		within  time.Duration
	}{
		"announced, none wanted": {"POST /plain HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n", 422, 0},
		"chunked, none wanted":   {"POST /plain HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", 408, humax.BodyTimeout},
		"announced":              {"POST /taking HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{", 408, humax.BodyTimeout},
		"chunked, sent":          {"POST /plain HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 204, 0},
		"sent":                   {"POST /taking HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{\"n\": 12}", 204, 0},
		"unknown field":          {"POST /taking HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{\"m\": 12}", 422, 0},
		"not JSON":               {"POST /taking HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n{bad", 422, 0},
		"empty":                  {"POST /taking HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 422, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				mux := http.NewServeMux()
				api := humago.New(mux, humax.Config("test", "1"))
				api.UseMiddleware(humax.Strict)
				done := 0
				huma.Register(api, huma.Operation{OperationID: "plain", Method: "POST", Path: "/plain"}, func(context.Context, *struct{}) (*struct{}, error) {
					done++
					return nil, nil
				})
				huma.Register(api, huma.Operation{OperationID: "taking", Method: "POST", Path: "/taking"}, func(context.Context, *struct {
					Body struct {
						N int `json:"n"`
					}
				}) (*struct{}, error) {
					done++
					return nil, nil
				})
				net := &memnet.Network{}
				l, err := net.Listen("127.0.0.1:80")
				errtest.None(t, err)
				srv := &http.Server{Handler: mux}
				go func() { _ = srv.Serve(l) }()
				defer srv.Close()
				conn, err := net.DialContext(t.Context(), "tcp", "127.0.0.1:80")
				errtest.None(t, err)
				defer conn.Close()
				begin := time.Now()
				errtest.Get(io.WriteString(conn, c.request))(t)
				res, err := http.ReadResponse(bufio.NewReader(conn), nil)
				errtest.None(t, err)
				body, _ := io.ReadAll(res.Body)
				if took := time.Since(begin); res.StatusCode != c.status || took > c.within {
					t.Errorf("%d after %v, want %d within %v: %s", res.StatusCode, took, c.status, c.within, body)
				}
				if (done == 1) != (c.status < 300) || c.status >= 400 && !strings.Contains(string(body), `"status":`+fmt.Sprint(c.status)) {
					t.Errorf("the route ran %d times, the answer is %s", done, body)
				}
			})
		})
	}
}

// TestSlowRoute checks that a route that takes longer than the limit for bodies
// is not canceled.
func TestSlowRoute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mux := http.NewServeMux()
		api := humago.New(mux, humax.Config("test", "1"))
		api.UseMiddleware(humax.Strict)
		huma.Register(api, huma.Operation{OperationID: "slow", Method: "POST", Path: "/slow"}, func(ctx context.Context, _ *struct {
			Body struct {
				N int `json:"n"`
			}
		}) (*struct{}, error) {
			select {
			case <-time.After(10 * humax.BodyTimeout):
				return nil, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		})
		net := &memnet.Network{}
		l, err := net.Listen("127.0.0.1:80")
		errtest.None(t, err)
		srv := &http.Server{Handler: mux}
		go func() { _ = srv.Serve(l) }()
		defer srv.Close()
		conn, err := net.DialContext(t.Context(), "tcp", "127.0.0.1:80")
		errtest.None(t, err)
		defer conn.Close()
		errtest.Get(io.WriteString(conn, "POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{\"n\": 12}"))(t)
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		errtest.None(t, err)
		res.Body.Close()
		if res.StatusCode != 204 {
			t.Errorf("status %d, want 204", res.StatusCode)
		}
	})
}

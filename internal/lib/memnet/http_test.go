package memnet_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/lib/memnet"
)

// TestHTTPInABubble checks that a net/http server and clients work in a bubble
// for an hour of its time: keep-alive, streaming, timeouts and shutdown.
func TestHTTPInABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &memnet.Network{}
		n.SetLatency("", 5*time.Millisecond)
		l, err := n.Listen("api:80")
		if err != nil {
			t.Fatal(err)
		}
		mux := http.NewServeMux()
		mux.HandleFunc("POST /echo", func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			w.Write(body)
		})
		mux.HandleFunc("GET /ticks", func(w http.ResponseWriter, r *http.Request) {
			for i := range 3 {
				time.Sleep(time.Minute)
				fmt.Fprintln(w, i)
				http.NewResponseController(w).Flush()
			}
		})
		mux.HandleFunc("GET /never", func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		srv := &http.Server{Handler: mux, IdleTimeout: time.Minute}
		served := make(chan error, 1)
		go func() { served <- srv.Serve(l) }()

		transport := &http.Transport{DialContext: n.DialContext}
		client := &http.Client{Transport: transport, Timeout: 10 * time.Minute}
		var group sync.WaitGroup
		for i := range 20 {
			group.Go(func() {
				body := strings.Repeat(fmt.Sprint(i), 100_000)
				if got := call(t, client, "POST", "http://api/echo", body); got != body {
					t.Errorf("echo gave %d bytes, want %d", len(got), len(body))
				}
			})
		}
		group.Wait()
		start := time.Now()
		if got := call(t, client, "GET", "http://api/ticks", ""); got != "0\n1\n2\n" {
			t.Errorf("ticks: %q", got)
		}
		if d := time.Since(start).Round(time.Minute); d != 3*time.Minute {
			t.Errorf("ticks took %v", d)
		}
		if _, err := client.Get("http://api/never"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a request past the client's timeout: %v", err)
		}
		time.Sleep(time.Hour)
		if c := n.Conns(); c != 0 {
			t.Errorf("%d connections left after the idle timeout", c)
		}
		transport.CloseIdleConnections()
		if err := srv.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
		if err := <-served; err != http.ErrServerClosed {
			t.Error(err)
		}
	})
}

func call(t *testing.T, client *http.Client, method, url, body string) string {
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Error(err)
		return ""
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Error(err)
		return ""
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Error(err)
	}
	return string(got)
}

package activity

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
)

// preset returns a ready-made probe.
func preset(t *testing.T, text string) *instance.Probe {
	t.Helper()
	p, err := instance.ParseProbe(text)
	if err != nil {
		t.Fatal(err)
	}
	return &p
}

// TestPublishedFormats checks the reading of answers copied from the servers'
// documentation, and of answers in any other form, which are unknown.
func TestPublishedFormats(t *testing.T) {
	const vllm = "# HELP vllm:num_requests_running Number of requests in model execution batches.\n# TYPE vllm:num_requests_running gauge\n" +
		"vllm:num_requests_running{engine=\"0\",model_name=\"unsloth/Llama-3.2-1B-Instruct\"} %v\n# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine=\"0\",model_name=\"unsloth/Llama-3.2-1B-Instruct\"} 0.0\n"
	const ollama = `{"models":[{"name":"gemma3","model":"gemma3","size":6591830464,"digest":"a2af6cc3eb7f","details":{"format":"gguf","family":"gemma3"},` +
		`"expires_at":"2025-10-17T16:47:07.93355-07:00","size_vram":5333539264,"context_length":4096}]}`
	const kernel = `{"id":"a","name":"python3","last_activity":"2026-01-02T03:04:05.000006Z","execution_state":"%s","connections":%d}`
	for _, c := range []struct {
		preset, path, body string
		want               idle.State
	}{
		{"vllm", "/metrics", fmt.Sprintf(vllm, "2.0"), idle.Active}, {"vllm", "/metrics", fmt.Sprintf(vllm, "0.0"), idle.Quiet},
		{"vllm", "/metrics", "# TYPE other gauge\nother 0\n", idle.Unknown},
		{"ollama", "/api/ps", ollama, idle.Active}, {"ollama", "/api/ps", `{"models":[]}`, idle.Quiet}, {"ollama", "/api/ps", `{"error":"x"}`, idle.Unknown},
		{"jupyter", "/api/kernels", `[]`, idle.Quiet}, {"jupyter", "/api/kernels", "[" + fmt.Sprintf(kernel, "idle", 0) + "]", idle.Quiet},
		{"jupyter", "/api/kernels", "[" + fmt.Sprintf(kernel, "dead", 0) + "," + fmt.Sprintf(kernel, "busy", 0) + "]", idle.Active},
		{"jupyter", "/api/kernels", "[" + fmt.Sprintf(kernel, "idle", 1) + "]", idle.Active}, {"jupyter", "/api/kernels", "[" + fmt.Sprintf(kernel, "starting", 0) + "]", idle.Active},
		{"jupyter", "/api/kernels", "[" + fmt.Sprintf(kernel, "pondering", 0) + "]", idle.Unknown}, {"jupyter", "/api/kernels", "[" + fmt.Sprintf(kernel, "idle", -1) + "]", idle.Unknown},
		{"jupyter", "/api/kernels", `[{"execution_state":"idle"}]`, idle.Unknown}, {"jupyter", "/api/kernels", `null`, idle.Unknown}, {"jupyter", "/api/kernels", `{}`, idle.Unknown},
		{"rabbitmq", "/api/overview", `{"queue_totals":{"messages":3,"messages_ready":3}}`, idle.Active}, {"rabbitmq", "/api/overview", `{"queue_totals":{"messages":0}}`, idle.Quiet},
		{"rabbitmq", "/api/overview", `{"queue_totals":{}}`, idle.Unknown},
		{"jupyterhub", "/hub/api/users", `[]`, idle.Quiet}, {"jupyterhub", "/hub/api/users", `[{"name":"ada","servers":{"":{"ready":true}}}]`, idle.Active},
	} {
		u := serve(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != c.path {
				w.WriteHeader(http.StatusNotFound)
			}
			fmt.Fprint(w, c.body)
		})
		if r := Read(t.Context(), preset(t, c.preset+":"+u), nil); r.State != c.want {
			t.Errorf("%s of %.80s is %v (%s), want %v", c.preset, c.body, r.State, r.Detail, c.want)
		}
	}
}

// TestToken checks that the token of a probe reaches the server and never the
// reading's text, and that nothing is sent without a readable token.
func TestToken(t *testing.T) {
	asked := 0
	u := serve(t, func(w http.ResponseWriter, r *http.Request) {
		asked++
		if a := r.Header.Get("Authorization"); a != "Bearer s3cret" && a != "token s3cret" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		fmt.Fprint(w, `[]`)
	})
	dir := t.TempDir()
	for content, want := range map[string]idle.State{"s3cret\n": idle.Quiet, "s3cret \nmore": idle.Quiet, "wrong": idle.Unknown, "": idle.Unknown, "\n": idle.Unknown,
		"a b": idle.Unknown, "a\rX: y": idle.Unknown} {
		path := filepath.Join(dir, "token")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"jupyter", "jupyterhub"} {
			r := Read(t.Context(), preset(t, name+",token-file="+path+":"+u), nil)
			if r.State != want || strings.Contains(r.Detail, "s3cret") {
				t.Errorf("%s with %q is %v (%s), want %v", name, content, r.State, r.Detail, want)
			}
		}
	}
	before := asked
	is(t, Read(t.Context(), preset(t, "jupyter,token-file="+filepath.Join(dir, "absent")+":"+u), nil), idle.Unknown, "no such file")
	is(t, Read(t.Context(), preset(t, "jupyter,token-file="+dir+":"+u), nil), idle.Unknown, "is a directory")
	if asked != before {
		t.Error("the server was asked without the token")
	}
}

// answering starts a server that answers every connection with do, and returns its
// address.
func answering(t *testing.T, do func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { defer c.Close(); do(c) }()
		}
	}()
	return l.Addr().String()
}

// status returns a Minecraft status packet with that text.
func status(text string) []byte {
	body := append(binary.AppendUvarint([]byte{0}, uint64(len(text))), text...)
	return append(binary.AppendUvarint(nil, uint64(len(body))), body...)
}

func stats(ready, reserved, delayed int) string {
	text := fmt.Sprintf("---\ncurrent-jobs-urgent: 0\ncurrent-jobs-ready: %d\ncurrent-jobs-reserved: %d\ncurrent-jobs-delayed: %d\ncurrent-jobs-buried: 7\n", ready, reserved, delayed)
	return fmt.Sprintf("OK %d\r\n%s\r\n", len(text), text)
}

func TestServerAnswers(t *testing.T) {
	for _, c := range []struct {
		kind, answer string
		want         idle.State
	}{
		{"minecraft", string(status(`{"players":{"max":20,"online":0},"description":"x"}`)), idle.Quiet},
		{"minecraft", string(status(`{"players":{"max":20,"online":3}}`)), idle.Active},
		{"minecraft", string(status(`{"players":{"max":20,"online":-1}}`)), idle.Unknown}, {"minecraft", string(status(`{"players":{"online":"0"}}`)), idle.Unknown},
		{"minecraft", string(status(`{"description":"x"}`)), idle.Unknown}, {"minecraft", string(status(`[]`)), idle.Unknown}, {"minecraft", string(status(``)), idle.Unknown},
		{"minecraft", string(status(`{"players":{"online":0}}`))[:9], idle.Unknown}, {"minecraft", "HTTP/1.1 400 Bad Request\r\n\r\n", idle.Unknown},
		{"minecraft", "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", idle.Unknown}, {"minecraft", "\xff\xff\xff\xff\x07", idle.Unknown}, {"minecraft", "\x02\x01\x00", idle.Unknown},
		{"minecraft", "\x03\x00\x05{}", idle.Unknown}, {"minecraft", "", idle.Unknown},
		{"beanstalkd", stats(0, 0, 0), idle.Quiet}, {"beanstalkd", stats(1, 0, 0), idle.Active}, {"beanstalkd", stats(0, 1, 0), idle.Active}, {"beanstalkd", stats(0, 0, 1), idle.Active},
		{"beanstalkd", "NOT_FOUND\r\n", idle.Unknown}, {"beanstalkd", "OK 4\r\n---\n\r\n", idle.Unknown}, {"beanstalkd", "OK 99\r\n---\n\r\n", idle.Unknown},
		{"beanstalkd", "OK 99999999\r\n---\n\r\n", idle.Unknown}, {"beanstalkd", "OK -1\r\n", idle.Unknown}, {"beanstalkd", "", idle.Unknown}, {"beanstalkd", "\xff\x00", idle.Unknown},
	} {
		addr := answering(t, func(conn net.Conn) {
			if _, err := bufio.NewReader(conn).ReadByte(); err == nil {
				_, _ = io.WriteString(conn, c.answer) // the probe may be gone
			}
		})
		r := Read(t.Context(), preset(t, c.kind+":"+addr), nil)
		if r.State != c.want || r.Detail == "" {
			t.Errorf("%s of %.60q is %v (%s), want %v", c.kind, c.answer, r.State, r.Detail, c.want)
		}
	}
}

// TestHostileTCP checks that servers that hang, answer byte by byte, or never end
// are unknown within the timeout.
func TestHostileTCP(t *testing.T) {
	for name, do := range map[string]func(net.Conn){
		"hang": func(c net.Conn) { _, _ = io.Copy(io.Discard, c) },
		"drip": func(c net.Conn) {
			for every := time.NewTicker(10 * time.Millisecond); ; <-every.C {
				if _, err := c.Write([]byte{0x80}); err != nil {
					return
				}
			}
		},
		"endless": func(c net.Conn) {
			for b := bytes.Repeat([]byte("x"), 1<<20); ; {
				if _, err := c.Write(b); err != nil {
					return
				}
			}
		},
		"long": func(c net.Conn) { _, _ = c.Write(binary.AppendUvarint(nil, maxStatus)); _, _ = io.Copy(io.Discard, c) },
	} {
		addr := answering(t, do)
		for _, kind := range []string{"minecraft", "beanstalkd"} {
			t.Run(name+"/"+kind, func(t *testing.T) {
				t.Parallel()
				is(t, Read(t.Context(), preset(t, kind+",timeout=1s:"+addr), nil), idle.Unknown, "")
			})
		}
	}
}

func FuzzServers(f *testing.F) {
	f.Add(status(`{"players":{"online":1}}`))
	f.Add([]byte(stats(1, 2, 3)))
	f.Add([]byte(`[{"execution_state":"idle","connections":0}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		text, err := readStatus(bufio.NewReader(bytes.NewReader(b)))
		for _, r := range []Reading{kernels(b), jobs(b), players(b), players(text)} {
			if r.Detail == "" || math.IsInf(r.Value, 0) || math.IsNaN(r.Value) {
				t.Errorf("%+v", r)
			}
		}
		if err != nil && text != nil {
			t.Error(text, err)
		}
	})
}

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"sync/atomic"
	"time"
)

// usage counts the traffic of the scripted client, from the program's point of
// view.
type usage struct {
	rx, tx atomic.Int64 // bytes received from the client and sent to it
	open   atomic.Int32
}

// run is a running program with a scripted client.
type run struct {
	dir   string
	stdin io.WriteCloser
	use   *usage
}

type counted struct {
	net.Conn
	u    *usage
	gone atomic.Bool
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.u.tx.Add(int64(n))
	return n, err
}

func (c *counted) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.u.rx.Add(int64(n))
	return n, err
}

func (c *counted) Close() error {
	if !c.gone.Swap(true) {
		c.u.open.Add(-1)
	}
	return c.Conn.Close()
}

// dial connects the client to the program, waiting until the program listens.
func (x *run) dial(ctx context.Context, port int) (net.Conn, error) {
	for {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			x.use.open.Add(1)
			return &counted{Conn: c, u: x.use}, nil
		}
		if ctx.Err() != nil || !pause(ctx, time.Second) {
			return nil, err
		}
	}
}

func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// between draws a duration from least to most.
func between(least, most time.Duration) time.Duration {
	return least + time.Duration(rand.Int64N(int64(most-least)))
}

type script func(ctx context.Context, x *run)

// browse requests pages in turn, with reading times in between. keep keeps the
// connection open.
func browse(port int, least, most time.Duration, keep bool, paths ...string) script {
	return func(ctx context.Context, x *run) {
		t := &http.Transport{DisableKeepAlives: !keep, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return x.dial(ctx, port) }}
		c := &http.Client{Transport: t}
		for n := 0; ctx.Err() == nil; n++ {
			q, err := http.NewRequestWithContext(ctx, "GET", fmt.Sprintf("http://127.0.0.1:%d%s", port, paths[n%len(paths)]), nil)
			if err == nil {
				if a, err := c.Do(q); err == nil {
					io.Copy(io.Discard, a.Body)
					a.Body.Close()
				}
			}
			pause(ctx, between(least, most))
		}
	}
}

// talk writes lines on a number of connections and discards the replies.
func talk(port, clients int, least, most time.Duration, lines ...string) script {
	return func(ctx context.Context, x *run) {
		for range clients {
			go func() {
				c, err := x.dial(ctx, port)
				if err != nil {
					return
				}
				defer c.Close()
				go io.Copy(io.Discard, c)
				for n := 0; ; n++ {
					if len(lines) > 0 {
						io.WriteString(c, lines[n%len(lines)])
					}
					if !pause(ctx, between(least, most)) {
						return
					}
				}
			}()
		}
		<-ctx.Done()
	}
}

// through runs a client by a shell command. The client connects to port, which is
// forwarded to the program's port to, so that its bytes are counted.
func through(port, to int, command string) script {
	return func(ctx context.Context, x *run) {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			return
		}
		go func() { <-ctx.Done(); l.Close() }()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					d, err := x.dial(ctx, to)
					if err != nil {
						return
					}
					defer d.Close()
					go func() { io.Copy(d, c); d.Close() }()
					io.Copy(c, d)
				}()
			}
		}()
		cmd := exec.CommandContext(ctx, "sh", "-c", strings.ReplaceAll(command, "$DIR", x.dir))
		in, err := cmd.StdinPipe()
		if err != nil || cmd.Start() != nil {
			return
		}
		<-ctx.Done()
		in.Close()
		cmd.Wait()
	}
}

// keys types lines into the program's tmux.
func keys(least, most time.Duration, lines ...string) script {
	return func(ctx context.Context, x *run) {
		for n := 0; ctx.Err() == nil; n++ {
			line := lines[n%len(lines)]
			for _, k := range line {
				exec.CommandContext(ctx, "tmux", "-S", x.dir+"/tmux", "send-keys", "-l", string(k)).Run()
				pause(ctx, between(60*time.Millisecond, 300*time.Millisecond))
			}
			exec.CommandContext(ctx, "tmux", "-S", x.dir+"/tmux", "send-keys", "Enter").Run()
			pause(ctx, between(least, most))
		}
	}
}

// requests writes lines to the program's standard input.
func requests(least, most time.Duration, lines ...string) script {
	return func(ctx context.Context, x *run) {
		for n := 0; ctx.Err() == nil; n++ {
			io.WriteString(x.stdin, strings.ReplaceAll(lines[min(n, len(lines)-1)], "$DIR", x.dir))
			pause(ctx, between(least, most))
		}
	}
}

// api simulates a model's API, which answers after a while, one token at a time.
func api(port int) script {
	return func(ctx context.Context, x *run) {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			return
		}
		go func() { <-ctx.Done(); l.Close() }()
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			x.use.open.Add(1)
			go answer(ctx, &counted{Conn: c, u: x.use})
		}
	}
}

// answer simulates the API's end of a connection: it receives the program's
// requests and answers them.
func answer(ctx context.Context, c net.Conn) {
	defer c.Close()
	if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil {
		return
	}
	pause(ctx, between(8*time.Second, 40*time.Second))
	io.WriteString(c, "HTTP/1.0 200 OK\r\n\r\n")
	for range 60 {
		io.WriteString(c, "data: {\"delta\":\"word\"}\n\n")
		pause(ctx, between(20*time.Millisecond, 80*time.Millisecond))
	}
}

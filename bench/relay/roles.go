package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime/pprof"
	"sync"
	"time"

	"lull/internal/relay"
)

// play runs one of the processes under measurement until ctx ends. Its first line
// of output is the address on which it listens.
func play(ctx context.Context, role, to, profile string) error {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	if profile != "" && role == "router" {
		f, err := os.Create(profile)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	switch role {
	case "backend":
		return listenAnd(ctx, ln, echo)
	case "plain":
		return listenAnd(ctx, ln, func(c net.Conn) { plainRelay(c.(*net.TCPConn), to) })
	case "router":
		return routerRelay(ctx, ln, to)
	}
	return fmt.Errorf("cannot play %q: it is backend, plain or router", role)
}

func listenAnd(ctx context.Context, ln net.Listener, serve func(net.Conn)) error {
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	for {
		c, err := ln.Accept()
		if err != nil {
			return ctx.Err()
		}
		go serve(c)
	}
}

func echo(c net.Conn) {
	defer c.Close()
	buf := make([]byte, 128<<10)
	for {
		n, err := c.Read(buf)
		if n > 0 {
			if _, err := c.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// plainRelay relays one connection with io.Copy, as a baseline.
func plainRelay(c *net.TCPConn, to string) {
	defer c.Close()
	b, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	defer b.Close()
	var up sync.WaitGroup
	up.Go(func() {
		io.Copy(b, c)
		b.(*net.TCPConn).CloseWrite()
	})
	io.Copy(c, b)
	c.CloseWrite()
	up.Wait()
}

type always struct{ b relay.Backend }

func (a always) Ready(int) (relay.Backend, bool)           { return a.b, true }
func (a always) Wake(context.Context, relay.Arrival) error { return nil }

var loopsFlag int

func routerRelay(ctx context.Context, ln net.Listener, to string) error {
	addr, err := netip.ParseAddrPort(to)
	if err != nil {
		return err
	}
	r, err := relay.New(relay.Config{Loops: loopsFlag})
	if err != nil {
		return err
	}
	in, err := r.Add("bench", always{relay.Backend{Addr: addr}}, relay.Options{})
	if err != nil {
		return err
	}
	if _, err := in.Listen(ln, 1); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	select {
	case err = <-done:
	case <-time.After(30 * time.Minute):
	}
	return err
}

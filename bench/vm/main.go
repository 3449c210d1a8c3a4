// VM measures microVMs: how long a client waits at each step of the ladder
// compared with a running guest, how much memory a guest uses at each, and how
// long it takes to save and wake many guests at once.
//
// Every figure has a baseline from the same run: wakes alternate with new
// connections to the running guest. It starts its own daemon with a fresh
// directory and leaves nothing behind.
//
// It needs Go, QEMU, mke2fs and a guest kernel (LULL_GUEST_KERNEL, or where lull
// host looks for one).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"
)

type settings struct {
	rounds  int
	guests  int
	machine string
	mib     int64
	wakes   int
	budget  string
}

func main() {
	var s settings
	serveOn := flag.String("serve", "", "internal: be the program, on this address")
	flag.IntVar(&s.rounds, "rounds", 20, "wakes from each rung")
	flag.IntVar(&s.guests, "guests", 50, "guests that are saved and woken at once; 0 skips this part")
	flag.StringVar(&s.machine, "machine", "microvm", "QEMU's machine: microvm or q35")
	flag.Int64Var(&s.mib, "memory", 128, "memory of a guest, MiB")
	flag.IntVar(&s.wakes, "wakes", 4, "restores from disk that the daemon runs at once")
	flag.StringVar(&s.budget, "budget", "auto", "memory limit for all guests together, as in lull host --memory")
	flag.Parse()
	if *serveOn != "" {
		fail(serve(*serveOn))
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	fail(measure(ctx, s))
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// serve echoes its input. It discards input that begins with 'S' and replies with
// the number of bytes.
func serve(addr string) error {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			var first [1]byte
			if _, err := io.ReadFull(c, first[:]); err != nil {
				return
			}
			if first[0] == 'S' {
				n, _ := io.Copy(io.Discard, c) // if a client disconnects early, the number shows that
				fmt.Fprintln(c, n)
				return
			}
			if _, err := c.Write(first[:]); err == nil {
				_, _ = io.Copy(c, c) // ends when the client disconnects
			}
		}()
	}
}

const waitLimit = 5 * time.Minute

// firstByte returns how long a new client waits for its first byte.
func firstByte(addr string) (time.Duration, error) {
	began := time.Now()
	c, err := net.DialTimeout("tcp", addr, waitLimit)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if err := errors.Join(c.SetDeadline(began.Add(waitLimit)), oneByte(c)); err != nil {
		return 0, err
	}
	return time.Since(began), nil
}

func oneByte(c net.Conn) error {
	if _, err := c.Write([]byte("x")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err
}

// throughput returns how fast the program receives a client's bytes, in MB/s.
func throughput(addr string, size int) (float64, error) {
	c, err := net.DialTimeout("tcp", addr, waitLimit)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	began := time.Now()
	buf := make([]byte, 256<<10)
	buf[0] = 'S'
	for sent := 0; sent < size; sent += len(buf) {
		if _, err := c.Write(buf); err != nil {
			return 0, err
		}
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		return 0, err
	}
	if _, err := io.ReadAll(c); err != nil {
		return 0, err
	}
	return float64(size) / 1e6 / time.Since(began).Seconds(), nil
}

// at returns the q-quantile of all.
func at(all []time.Duration, q float64) time.Duration {
	if len(all) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(all))
	return s[min(int(q*float64(len(s))), len(s)-1)].Round(10 * time.Microsecond)
}

func row(name string, all, base []time.Duration) {
	fmt.Printf("%-28s p50 %9s  p99 %9s", name, at(all, 0.5), at(all, 0.99))
	if len(base) > 0 {
		fmt.Printf("  beside running: %+.2f ms p50, %.1fx", float64(at(all, 0.5)-at(base, 0.5))/1e6, float64(at(all, 0.5))/float64(at(base, 0.5)))
	}
	fmt.Println()
}

// each runs f for 0..n-1 concurrently and joins the errors.
func each(n int, f func(int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Demo shows what lull does with idle programs. It starts its own host with
// short timers, runs programs on it (a web server, Redis, PostgreSQL, and a web
// server in a microVM that hibernates; programs that are not installed are
// named and omitted), and prints a line for each of them every second while
// clients come and go. In addition a server watches a simulated region of a
// dozen cloud workers, whose scripted users live a day in 24 minutes. It ends
// with Ctrl-C or after --for, and leaves nothing running.
//
// It drives the built programs of --bin as a user does and builds nothing.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// scene is one part of the demo. It starts its programs, prints what to type,
// and returns a function that ends it.
type scene struct {
	name  string
	start func(ctx context.Context, s *stage) (end func() error, err error)
}

var scenes = []scene{
	{"host", startHost},
	{"fleet", startFleet},
}

// stage is the state shared by the scenes.
type stage struct {
	bin   string // folder of the built programs
	data  string // folder for everything the demo writes
	out   io.Writer
	color bool
	short bool // ends by itself, so the visits come sooner
	lines []func(ctx context.Context) string
}

func main() {
	bin := flag.String("bin", "bin", "folder with lull and lull-shim; make build fills it")
	data := flag.String("data", "lull-data/demo", "folder for what the demo writes; what an earlier demo left in it is removed")
	length := flag.Duration("for", 0, "end after so long; 0 waits for Ctrl-C")
	serve := flag.String("serve", "", "internal: be the web server, on this address")
	flag.Parse()
	var err error
	if *serve != "" {
		err = serveWeb(*serve)
	} else {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		if *length > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, *length)
			defer cancel()
		}
		err = show(ctx, *bin, *data, *length > 0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// show starts every scene, prints the table until ctx ends, and ends them in
// reverse order.
func show(ctx context.Context, bin, data string, short bool) (err error) {
	s := &stage{out: os.Stdout, color: os.Getenv("NO_COLOR") == "" && isTerminal(os.Stdout), short: short}
	if s.bin, err = filepath.Abs(bin); err != nil {
		return err
	}
	if s.data, err = filepath.Abs(data); err != nil {
		return err
	}
	if err := s.freshFolder(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(s.data)) }()
	for _, sc := range scenes {
		end, serr := sc.start(ctx, s)
		if end != nil {
			defer func() { err = errors.Join(err, end()) }()
		}
		if serr != nil && ctx.Err() == nil {
			return fmt.Errorf("cannot start the %s: %w", sc.name, serr)
		}
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for ctx.Err() == nil {
		for _, line := range s.lines {
			fmt.Fprintln(s.out, line(ctx))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	fmt.Fprintln(s.out, "\nending: programs, host, server and cloud are stopped")
	return nil
}

// mark identifies a folder as the demo's own.
const mark = ".lull-demo"

// freshFolder empties the demo's folder, and never any other.
func (s *stage) freshFolder() error {
	entries, err := os.ReadDir(s.data)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if len(entries) > 0 {
		if _, err := os.Stat(filepath.Join(s.data, mark)); err != nil {
			return fmt.Errorf("cannot use %s: it holds files that no demo wrote; name another with --data", s.data)
		}
		if err := os.RemoveAll(s.data); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(s.data, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(s.data, mark), nil, 0o644)
}

func isTerminal(f *os.File) bool {
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0
}

// paint colors text if colors are enabled.
func (s *stage) paint(code, text string) string {
	if !s.color {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

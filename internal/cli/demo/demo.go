// Package demo is lull demo. It runs real programs on a host with short timers,
// visits them as clients would, and runs a server that watches a simulated region of
// cloud workers. A newcomer sees within a minute what lull does.
//
// It uses the program lull as a user would. Every part is a process of its own, below
// a temporary directory that is removed at the end. Parts that this machine cannot
// run are left out, with the reason.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/cli/term"
)

// Options configure a demo.
type Options struct {
	term.Term
	// Program is the file of lull, which the demo starts.
	Program string
	// Kernel is the guest kernel for the microVM; if empty, the host chooses one.
	Kernel string
	// For is the duration of the demo; 0 means until ctx ends.
	For time.Duration
}

// stage holds the data that the parts of a demo share.
type stage struct {
	Options
	data string // directory for everything that the demo writes
	*screen

	mu   sync.Mutex
	left []string // programs that are left out, with the reason
}

// leaveOut records that a part is not shown, and why.
func (s *stage) leaveOut(name string, why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left = append(s.left, fmt.Sprintf("%-11s %v", name, why))
}

// Show runs the demo until ctx ends, and then removes everything it has created. A
// part that this machine cannot run is left out. It is an error if no part can run.
func Show(ctx context.Context, o Options) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if o.For > 0 {
		ctx, cancel = context.WithTimeout(ctx, o.For)
		defer cancel()
	}
	s := &stage{Options: o, screen: newScreen(o.Out, o.Getenv, cancel)}
	if s.data, err = directory(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(s.data)) }()
	s.say("lull demo: programs of this machine fall asleep and wake, and a server watches\n" +
		"a simulated fleet. Ctrl-C ends it and leaves nothing behind.\n\nStarting ...")
	h, c := &host{stage: s}, &cloud{stage: s, before: map[string]string{}, known: map[string]bool{}}
	var clients sync.WaitGroup
	defer func() {
		cancel()
		s.say("\nEnding: programs, host, server and cloud are stopped.")
		clients.Wait()
		err = errors.Join(err, h.end(), c.end())
	}()
	var parts sync.WaitGroup
	var herr, cerr error
	parts.Go(func() { herr = h.start(ctx) })
	parts.Go(func() { cerr = c.start(ctx) })
	parts.Wait()
	switch {
	case ctx.Err() != nil:
		return nil
	case herr != nil && cerr != nil:
		return errors.Join(herr, cerr)
	case herr != nil:
		s.leaveOut("programs", herr)
	case cerr != nil:
		s.leaveOut("fleet", cerr)
	}
	if err := s.introduce(h, c); err != nil {
		return err
	}
	clients.Go(func() { h.startGuest(ctx) })
	clients.Go(func() { h.visit(ctx) })
	clients.Go(func() { c.live(ctx) })
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for ctx.Err() == nil {
		s.show(append(h.rows(ctx), c.rows(ctx)...))
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	return nil
}

// introduce prints the programs that are shown, those that are left out with the
// reason, and the commands that a user can try.
func (s *stage) introduce(h *host, c *cloud) error {
	var b strings.Builder
	fmt.Fprintf(&b, "\nShown here:\n\n")
	for _, p := range h.all() {
		fmt.Fprintf(&b, "  %-11s %s\n", p.name, p.what)
	}
	if c.Client != nil {
		fmt.Fprintf(&b, "  %-11s simulated cloud workers, and a server that watches them\n", "fleet")
	}
	fmt.Fprintf(&b, "\nA program is paused %s after its last connection, and the next one wakes it.\n", pauseAfter)
	if len(s.left) > 0 {
		fmt.Fprintf(&b, "\nLeft out on this machine:\n\n")
		for _, l := range s.left {
			fmt.Fprintf(&b, "  %s\n", l)
		}
	}
	env, err := s.environment(h, c)
	if err != nil {
		return err
	}
	fmt.Fprintf(&b, "\nIn another terminal:\n\n  . %s\n\nThen try:\n\n", env)
	type line struct{ command, does string }
	var try []line
	if all := h.all(); len(all) > 0 {
		p := all[0]
		try = append(try, line{p.try, "wakes " + p.name}, line{"lull ps", "what sleeps, and what comes next"}, line{"lull why " + p.name, "why it sleeps, or does not"})
	}
	if c.Client != nil {
		try = append(try, line{"lull worker ls", "the fleet"}, line{"lull worker why old-1", "why that machine was stopped"})
	}
	for _, t := range try {
		fmt.Fprintf(&b, "  %-40s # %s\n", t.command, t.does)
	}
	s.say("%s", b.String())
	return nil
}

// environment writes a shell file that sets the addresses of the demo's host and
// server, and returns its path.
func (s *stage) environment(h *host, c *cloud) (string, error) {
	var b strings.Builder
	set := func(name, value string) {
		fmt.Fprintf(&b, "export %s='%s'\n", name, strings.ReplaceAll(value, "'", `'\''`))
	}
	if h.Client != nil {
		set("LULL_HOST", "unix://"+h.socket)
	}
	if c.Client != nil {
		set("LULL_SERVER", c.url)
		set("LULL_TOKEN", c.token)
	}
	if found, err := exec.LookPath("lull"); err != nil || !sameFile(found, s.Program) {
		fmt.Fprintf(&b, "lull() { '%s' \"$@\"; }\n", strings.ReplaceAll(s.Program, "'", `'\''`))
	}
	file := filepath.Join(s.data, "env")
	return file, os.WriteFile(file, []byte(b.String()), 0o600)
}

func sameFile(a, b string) bool {
	one, err := os.Stat(a)
	if err != nil {
		return false
	}
	two, err := os.Stat(b)
	return err == nil && os.SameFile(one, two)
}

// directory creates the demo's directory in a file system that allows executing
// programs.
func directory() (string, error) {
	var errs []error
	for _, parent := range []string{os.TempDir(), "/var/tmp"} {
		var fs unix.Statfs_t
		if err := unix.Statfs(parent, &fs); err != nil || fs.Flags&unix.ST_NOEXEC != 0 {
			errs = append(errs, fmt.Errorf("%s does not exist or is mounted noexec", parent))
			continue
		}
		dir, err := os.MkdirTemp(parent, "lull-demo-")
		if err == nil {
			return dir, os.Chmod(dir, 0o755) // PostgreSQL's user needs access
		}
		errs = append(errs, err)
	}
	return "", fmt.Errorf("cannot create a directory for the demo; set TMPDIR: %w", errors.Join(errs...))
}

// clean returns this process's environment without settings for lull and AWS, which
// are for the user's own host, server and accounts.
func clean() []string {
	var env []string
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "LULL_") && !strings.HasPrefix(e, "AWS_") {
			env = append(env, e)
		}
	}
	return env
}

// Visit requests a page from a web server, and returns its status and how long it
// took to answer.
func Visit(ctx context.Context, addr string) (string, error) {
	began := time.Now()
	said, err := visitWeb(ctx, addr)
	return fmt.Sprintf("%s in %s", said, short(time.Since(began))), err
}

// Serve runs the demo's own web server, for machines without Python and for the
// guest.
func Serve(ctx context.Context, addr string) error {
	srv := &http.Server{Addr: addr, ReadHeaderTimeout: visitLimit, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, page) // an error means that the client disconnected
	})}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	if err := srv.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Command lull-shim keeps the instances of one host while its daemon restarts
// (package shim). The daemon starts it; users rarely need to.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"lull/internal/shim"
)

func main() {
	if code, ok := shim.Stage(os.Args); ok {
		os.Exit(code)
	}
	os.Exit(run())
}

func run() int {
	flags := flag.NewFlagSet("lull-shim", flag.ContinueOnError)
	dir := flags.String("dir", "", "directory of the shim (required; its socket is DIR/shim.sock)")
	gone := flags.Duration("gone", 2*time.Second, "without a daemon for so long, everything is thawed")
	linger := flags.Duration("linger", time.Minute, "without a daemon and without a run for so long, the shim ends")
	version := flags.Bool("version", false, "print the version and end")
	if err := flags.Parse(os.Args[1:]); err != nil {
		return 2
	}
	if *version {
		fmt.Println(release())
		return 0
	}
	if *dir == "" || flags.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "cannot start: want --dir DIR and nothing else")
		return 2
	}
	exe, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, "cannot find this program's own file:", err)
		return 1
	}
	// One process keeps thousands of pipes. Programs get back what we were given.
	limit, err := shim.RaiseFiles()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err != nil {
		log.Warn("the limit of open files stays", "limit", limit, "err", err)
	}
	debug.SetGCPercent(50) // it lives for months and does little
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	s, err := shim.New(shim.Config{Dir: *dir, Exe: exe, Release: release(), Log: log, Gone: *gone, Linger: *linger})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := s.Run(ctx); err != nil {
		log.Error("ended", "err", err)
		return 1
	}
	return 0
}

func release() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	rev := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			rev += " " + s.Value
		}
	}
	return rev
}

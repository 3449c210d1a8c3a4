package shim

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"time"
)

// Name is the file name of the supervisor. A program that contains the supervisor
// starts it by running itself under this name.
const Name = "lull-shim"

// Main is the main function of lull-shim. args are the arguments after its name. It
// runs until ctx ends and returns the exit code. The caller must ignore SIGHUP and
// SIGPIPE.
func Main(ctx context.Context, args []string) int {
	flags := flag.NewFlagSet(Name, flag.ContinueOnError)
	dir := flags.String("dir", "", "directory of the shim (required; its socket is DIR/shim.sock)")
	gone := flags.Duration("gone", 2*time.Second, "thaw everything after this time without a daemon")
	linger := flags.Duration("linger", time.Minute, "exit after this time without a daemon and without a run")
	version := flags.Bool("version", false, "print the version and end")
	if err := flags.Parse(args); err != nil {
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
	// This process keeps thousands of pipes open. Programs still get the original
	// limit.
	limit, err := RaiseFiles()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err != nil {
		log.Warn("cannot raise the limit on open files", "limit", limit, "err", err)
	}
	debug.SetGCPercent(50) // the shim lives for months and does little
	s, err := New(Config{Dir: *dir, Exe: exe, Release: release(), Log: log, Gone: *gone, Linger: *linger})
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

// Command lull finds idle compute, pauses it safely and brings it back the
// moment it is needed.
//
// This package is wiring only: it alone touches the environment, flags,
// listeners, exit codes and the default logger. Each verb has its own file.
package main

import (
	"context"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"lull/internal/shim"
)

func main() {
	// lull is its own lull-shim where it neither contains nor finds one.
	if code, ok := shim.Stage(os.Args); ok {
		os.Exit(code)
	}
	if filepath.Base(os.Args[0]) == shim.Name {
		os.Exit(shim.Main(os.Args[1:]))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Getenv)
	stop()
	os.Exit(code)
}

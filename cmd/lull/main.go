// Command lull finds idle compute, pauses it safely and resumes it when it is needed.
//
// This package is wiring only. No other package uses the environment, flags,
// listeners, exit codes or the default logger. Each verb has its own file.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code, ok := asShim(ctx, os.Args)
	if !ok {
		code = run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Getenv)
	}
	stop()
	os.Exit(code)
}

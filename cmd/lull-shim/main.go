// Command lull-shim keeps the instances of one host while its daemon restarts
// (package shim). The daemon starts it; users rarely need to.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"lull/internal/shim"
)

func main() {
	if code, ok := shim.Stage(os.Args); ok {
		os.Exit(code)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	code := shim.Main(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

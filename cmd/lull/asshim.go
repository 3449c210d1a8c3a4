//go:build linux && !portable

package main

import (
	"context"
	"os/signal"
	"path/filepath"
	"syscall"

	"lull/internal/shim"
)

// asShim runs lull-shim, or one of its parts, if args request that; ok reports
// whether they do. A lull that neither contains nor finds lull-shim starts itself
// under that name.
func asShim(ctx context.Context, args []string) (code int, ok bool) {
	if code, ok := shim.Stage(args); ok {
		return code, true
	}
	if filepath.Base(args[0]) != shim.Name {
		return 0, false
	}
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	return shim.Main(ctx, args[1:]), true
}

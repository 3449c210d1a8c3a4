//go:build !linux || portable

package main

import "context"

// asShim reports false: only Linux has hosts.
func asShim(context.Context, []string) (code int, ok bool) { return 0, false }

//go:build !linux || portable

package main

import "context"

// asShim returns false, because only Linux has hosts.
func asShim(context.Context, []string) (code int, ok bool) { return 0, false }

//go:build !linux

package etcd

import "golang.org/x/sys/unix"

// bootClock continues while a Mac sleeps.
const bootClock = unix.CLOCK_MONOTONIC

//go:build !linux

package etcd

import "golang.org/x/sys/unix"

// bootClock is a clock that continues while a Mac sleeps.
const bootClock = unix.CLOCK_MONOTONIC

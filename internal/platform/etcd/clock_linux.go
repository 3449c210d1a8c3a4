package etcd

import "golang.org/x/sys/unix"

const bootClock = unix.CLOCK_BOOTTIME

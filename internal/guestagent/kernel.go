package guestagent

import (
	"fmt"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func setClock(t time.Time) error {
	tv := unix.NsecToTimeval(t.UnixNano())
	if err := unix.Settimeofday(&tv); err != nil {
		return fmt.Errorf("cannot set the clock: %w", err)
	}
	return nil
}

// ioctl requests of /dev/random (linux/random.h).
const (
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
)

// randomPool opens the random device once and keeps it open. A restored guest is
// reseeded before anything else, and opening the device would take milliseconds on
// an emulated CPU.
var randomPool = sync.OnceValues(func() (int, error) {
	return unix.Open("/dev/urandom", unix.O_WRONLY|unix.O_CLOEXEC, 0)
})

// seed adds entropy to the kernel's pool and makes it effective immediately.
func seed(b []byte) error {
	fd, err := randomPool()
	if err != nil {
		return fmt.Errorf("cannot open the random pool: %w", err)
	}
	var info struct {
		bits, size int32
		b          [512]byte
	}
	info.bits, info.size = int32(len(b)*8), int32(copy(info.b[:], b))
	for _, c := range []struct {
		req uintptr
		arg unsafe.Pointer
	}{{rndAddEntropy, unsafe.Pointer(&info)}, {rndReseedCRNG, nil}} {
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), c.req, uintptr(c.arg)); errno != 0 {
			return fmt.Errorf("cannot reseed the random pool: %w", errno)
		}
	}
	return nil
}

// powerOff syncs and powers off the machine; it returns only on an error.
func powerOff() error {
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		return fmt.Errorf("cannot power off: %w", err)
	}
	return nil
}

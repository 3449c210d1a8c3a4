// Package thread runs a function on its own thread, for state that the kernel
// keeps per thread: user, umask, file system view.
//
// It guarantees that no other goroutine ever runs on that thread, which ends
// with the function, and that it is not the first thread of the process, whose
// state /proc/self shows as that of the whole process.
package thread

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Own runs f and waits for it.
func Own(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() { // while this goroutine holds the thread, no other can get it
			Own(f)
			runtime.UnlockOSThread()
			return
		}
		f()
	}()
	<-done
}

// Package thread runs a function on a thread of its own, for state that the
// kernel keeps per thread: user, umask, file system view.
//
// It guarantees that no other goroutine ever runs on that thread, and that the
// thread ends with the function. It is never the main thread of the process,
// whose state /proc/self shows as that of the whole process.
package thread

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Own runs f on a thread of its own and waits for it.
func Own(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() { // this goroutine holds the main thread, so another goroutine gets another one
			Own(f)
			runtime.UnlockOSThread()
			return
		}
		f()
	}()
	<-done
}

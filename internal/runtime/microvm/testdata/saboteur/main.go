// Command saboteur is a faulty guest agent. It serves like lull-harness until
// the host requests a fault of its control channel, by a line to port 9 of the
// guest: closed, garbage, half, long, flood, newlines, mute, or right for none.
package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/guestagent"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "saboteur:", err)
	}
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}

func run() error {
	cfg, err := guestagent.Boot()
	if err != nil {
		return err
	}
	f := cfg.Channel.(*os.File)
	w := &wire{path: f.Name(), f: f}
	cfg.Channel = w
	ln, err := net.Listen("tcp", ":9")
	if err != nil {
		return err
	}
	go w.orders(ln)
	h, err := guestagent.New(cfg)
	if err != nil {
		return err
	}
	return h.Run(context.Background())
}

// wire is the control channel with a fault.
type wire struct {
	path string

	mu    sync.Mutex
	f     *os.File // nil while it is closed
	fault string
}

func (w *wire) Read(b []byte) (int, error) {
	w.mu.Lock()
	f := w.f
	w.mu.Unlock()
	if f == nil {
		time.Sleep(10 * time.Millisecond)
		return 0, nil
	}
	n, err := f.Read(b)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.f != f { // it was closed in the meantime
		return 0, nil
	}
	return n, err
}

func (w *wire) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.f == nil || w.fault == "mute" {
		return len(b), nil
	}
	return w.f.Write(b)
}

func (w *wire) orders(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		line, _ := bufio.NewReader(c).ReadString('\n')
		w.order(strings.TrimSpace(line))
		fmt.Fprintln(c, "done")
		c.Close()
	}
}

// junk returns what each fault sends, once or, for a flood, repeatedly.
func junk(fault string) []byte {
	switch fault {
	case "garbage":
		b := make([]byte, 256<<10)
		for n := range b {
			b[n] = byte(rand.Uint32())
		}
		return b
	case "half":
		return []byte(`{"jsonrpc":"2.0","method":"log","params":{"data":"`)
	case "long":
		return bytes.Repeat([]byte("x"), 200<<10)
	case "newlines":
		return bytes.Repeat([]byte("\n"), 64<<10)
	case "flood":
		return bytes.Repeat([]byte(`{"jsonrpc":"2.0","method":"activity","params":{"tcp":1,"cpu_ms":1,"net_bytes":1}}`+"\n"), 500)
	}
	return nil
}

func (w *wire) order(fault string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fault = fault
	switch fault {
	case "closed":
		if w.f != nil {
			w.f.Close()
			w.f = nil
		}
		return
	case "right", "mute":
		if w.f == nil {
			f, err := os.OpenFile(w.path, os.O_RDWR|unix.O_NONBLOCK, 0)
			if err != nil {
				fmt.Fprintln(os.Stderr, "saboteur:", err)
				return
			}
			w.f = f
		}
		return
	}
	go func() {
		b := junk(fault)
		for again := true; again; again = fault == "flood" || fault == "newlines" {
			w.mu.Lock()
			on := w.fault == fault && w.f != nil
			f := w.f
			w.mu.Unlock()
			if !on {
				return
			}
			if _, err := f.Write(b); err != nil {
				return
			}
		}
	}()
}

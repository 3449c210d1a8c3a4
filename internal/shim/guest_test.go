package shim_test

import (
	"bufio"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"lull/internal/lib/waittest"
	"lull/internal/protocol/shimctl"
)

// qemuMonitor answers QMP like a QEMU whose guest is in a given state, with an
// event before each answer. It records the commands.
type qemuMonitor struct {
	socket string
	status string

	mu    sync.Mutex
	asked []string
}

func newMonitor(t *testing.T, name, status string) *qemuMonitor {
	t.Helper()
	m := &qemuMonitor{socket: filepath.Join(t.TempDir(), name), status: status}
	ln, err := net.Listen("unix", m.socket)
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	t.Cleanup(func() { ln.Close(); serving.Wait() })
	serving.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			m.serve(c)
		}
	})
	return m
}

func (m *qemuMonitor) serve(c net.Conn) {
	defer c.Close()
	fmt.Fprintln(c, `{"QMP": {"version": {}, "capabilities": []}}`)
	for in := bufio.NewScanner(c); in.Scan(); {
		_, command, _ := strings.Cut(in.Text(), `"execute":"`)
		command, _, _ = strings.Cut(command, `"`)
		m.mu.Lock()
		m.asked = append(m.asked, command)
		m.mu.Unlock()
		fmt.Fprintln(c, `{"timestamp": {"seconds": 1}, "event": "NIC_RX_FILTER_CHANGED"}`)
		if command == "query-status" {
			fmt.Fprintf(c, `{"return": {"status": %q, "running": false}}`+"\n", m.status)
		} else {
			fmt.Fprintln(c, `{"return": {}}`)
		}
	}
}

func (m *qemuMonitor) commands() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.asked)
}

// TestOutsideGuest checks that a guest that QEMU has paused is continued when the
// daemon has ended, and that the next daemon is told so. A guest in another state
// is left alone, and a QEMU that has ended is forgotten.
func TestOutsideGuest(t *testing.T) {
	b := newBench(t, "LULL_TEST_GONE=50ms").start()
	paused, saving := newMonitor(t, "p", "paused"), newMonitor(t, "s", "postmigrate")
	b.outside(shimctl.Outside{ID: "paused", Socket: paused.socket, QMP: true})
	b.outside(shimctl.Outside{ID: "saving", Socket: saving.socket, QMP: true})
	b.outside(shimctl.Outside{ID: "ended", Socket: filepath.Join(t.TempDir(), "none"), QMP: true})
	b.c.Close()
	waittest.Until(t, "all are done with", func() bool { return len(b.kept()) == 0 })
	if got := paused.commands(); !slices.Equal(got, []string{"qmp_capabilities", "query-status", "cont"}) {
		t.Errorf("a paused guest's QEMU was asked %v", got)
	}
	if got := saving.commands(); !slices.Equal(got, []string{"qmp_capabilities", "query-status"}) {
		t.Errorf("the QEMU of a guest that is saved was asked %v", got)
	}
	b.connect()
	var told []string
	for _, th := range b.c.Welcome.Thawed {
		told = append(told, th.IDs...)
	}
	if !slices.Equal(told, []string{"paused"}) {
		t.Errorf("the next daemon receives %v", told)
	}
}

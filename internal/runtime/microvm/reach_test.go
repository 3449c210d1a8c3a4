package microvm

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/runtime/microvm/vnet"
)

// greeter starts a server on every address of this machine and returns its
// port.
func greeter(t *testing.T) uint16 {
	t.Helper()
	ln, err := net.Listen("tcp4", "0.0.0.0:0")
	errtest.None(t, err)
	var serve sync.WaitGroup
	t.Cleanup(serve.Wait)
	t.Cleanup(func() { ln.Close() })
	serve.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(c, "the host")
			c.Close()
		}
	})
	return netip.MustParseAddrPort(ln.Addr().String()).Port()
}

// own returns an address of this machine other than loopback, or the zero Addr.
func own(t *testing.T) (a netip.Addr) {
	t.Helper()
	all, err := net.InterfaceAddrs()
	errtest.None(t, err)
	for _, x := range all {
		if p, err := netip.ParsePrefix(x.String()); err == nil && p.Addr().Is4() && !p.Addr().IsLoopback() && !p.Addr().IsLinkLocalUnicast() {
			return p.Addr()
		}
	}
	return a
}

// TestReach runs three guests, one in each network mode. It checks that none
// reaches another, that a guest reaches this machine's loopback and addresses only
// in mode Full, and that the user of one guest's QEMU can open nothing of
// another's.
func TestReach(t *testing.T) {
	b := newBench(t, nil)
	modes := []instance.Net{instance.NetNone, instance.NetOutbound, instance.NetFull}
	var up sync.WaitGroup
	works, errs := make([]instance.Workload, len(modes)), make([]error, len(modes))
	for n, mode := range modes {
		l := b.launch(string(mode), 1, "guest", "serve", ":80")
		l.Net = mode
		up.Go(func() { works[n], errs[n] = b.Start(t.Context(), l) })
	}
	up.Wait()
	errtest.None(t, errors.Join(errs...))
	port, address := greeter(t), own(t)
	for n, mode := range modes {
		w := works[n].(*Work)
		listening(t, w, "80")
		host := "refused"
		if mode == instance.NetFull {
			host = "got the host"
		}
		rows := []struct{ what, to, want string }{
			{"its own server", netip.AddrPortFrom(vnet.Guest, 80).String(), "connected"},
			{"the host's loopback", netip.AddrPortFrom(vnet.HostAddr, port).String(), host},
			{"the gateway", netip.AddrPortFrom(vnet.Gateway, port).String(), "refused"},
			{"a neighbour", netip.AddrPortFrom(vnet.Guest.Next(), 80).String(), "refused"},
			{"the cloud's credentials", "169.254.169.254:80", "refused"},
			{"its own loopback", fmt.Sprint("127.0.0.1:", port), "refused"},
		}
		if address.IsValid() {
			rows = append(rows, struct{ what, to, want string }{"the host's address", netip.AddrPortFrom(address, port).String(), host})
		}
		for _, r := range rows {
			verb := "dial"
			if r.want == "connected" {
				verb = "connect"
			}
			o, err := b.Exec(t.Context(), string(mode), instance.Command{Command: []string{"guest", verb, r.to}})
			if err != nil || !strings.HasPrefix(o.Stdout, r.want) {
				t.Errorf("%s from a guest with %s: %+v, %v; want %s", r.what, mode, o, err, r.want)
			}
		}
	}

	// Try as an attacker who has taken over one QEMU.
	uid, ok := b.rights.user(string(modes[0]))
	if !ok {
		t.Log("QEMU has the user of its host here")
		return
	}
	var files []string
	err := filepath.WalkDir(b.cfg.Dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, path)
		}
		return err
	})
	if err != nil || len(files) < 10 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	cat := exec.Command("/bin/cat", files...)
	cat.Dir = "/"
	cat.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	out, err := cat.CombinedOutput()
	if err == nil || strings.Count(string(out), "Permission denied") != len(files) {
		t.Errorf("a user of QEMU may open some of %d files: %v\n%.2000s", len(files), err, out)
	}
	for _, w := range works {
		look := exec.Command("/bin/ls", fmt.Sprintf("/proc/%d/fd/", w.Identity().PID))
		look.Dir, look.SysProcAttr = "/", cat.SysProcAttr
		mine := w.(*Work).id == string(modes[0])
		if err := look.Run(); err == nil != mine {
			t.Errorf("the user of %s and the open files of %s: %v", modes[0], w.(*Work).id, err)
		}
	}
}

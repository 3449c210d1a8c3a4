package guestagent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"lull/internal/protocol/guest"
)

// Thresholds for a heartbeat: more than 1 % CPU over the interval, or at least 512
// bytes of network traffic per 5 s.
const (
	cpuShare  = 0.01
	netBytes  = 512
	netWindow = 5 * time.Second
	maxTable  = 64 << 20 // maximum size of a socket table, in bytes
)

// health returns the workload's readings. Each of them can fail independently.
func (h *Harness) health() guest.HealthAnswer {
	h.mu.Lock()
	a := guest.HealthAnswer{Running: h.main != nil && h.exit == nil}
	h.mu.Unlock()
	a.Dropped = h.logs.lost()
	if d, err := h.cpu(); err != nil {
		a.CPUErr = err.Error()
	} else {
		a.CPU = d.Milliseconds()
	}
	if n, err := h.netBytes(); err != nil {
		a.NetErr = err.Error()
	} else {
		a.Net = n
	}
	if err := h.tcp(&a); err != nil {
		a.TCPErr = err.Error()
	}
	a.Free, a.Now = h.available(), time.Now().UnixNano()
	return a
}

// oomKills returns how many processes the guest's kernel has killed for lack of
// memory since boot, or 0 if unknown. It counts those of the whole guest, because
// the workload may use all of the guest's memory.
func (h *Harness) oomKills() uint64 {
	b, err := os.ReadFile(filepath.Join(h.cfg.Proc, "vmstat"))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "oom_kill "); ok {
			n, _ := strconv.ParseUint(strings.TrimSpace(v), 10, 64) // 0 if not a number
			return n
		}
	}
	return 0
}

// cpu returns the CPU time that the workload's group has used since boot.
func (h *Harness) cpu() (time.Duration, error) {
	if h.cfg.Group == "" {
		return 0, errors.New("cannot read the CPU time: the workload has no control group")
	}
	b, err := os.ReadFile(filepath.Join(h.cfg.Group, "cpu.stat"))
	if err != nil {
		return 0, fmt.Errorf("cannot read the CPU time: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "usage_usec "); ok {
			us, err := strconv.ParseInt(strings.TrimSpace(v), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("cannot read the CPU time: %w", err)
			}
			return time.Duration(us) * time.Microsecond, nil
		}
	}
	return 0, errors.New("cannot read the CPU time: cpu.stat has no usage_usec")
}

// netBytes returns the bytes that passed the network card in both directions.
func (h *Harness) netBytes() (uint64, error) {
	total := uint64(0)
	for _, f := range []string{"rx_bytes", "tx_bytes"} {
		b, err := os.ReadFile(filepath.Join(h.cfg.Sys, "class/net", h.cfg.Card, "statistics", f))
		if err != nil {
			return 0, fmt.Errorf("cannot read the network card: %w", err)
		}
		n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("cannot read the network card: %w", err)
		}
		total += n
	}
	return total, nil
}

func (h *Harness) available() int64 {
	b, err := os.ReadFile(filepath.Join(h.cfg.Proc, "meminfo"))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "MemAvailable:"); ok {
			kb, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
			return kb << 10
		}
	}
	return 0
}

// Socket states in /proc/net/tcp.
const (
	established = 0x01
	synRecv     = 0x03
	closeWait   = 0x08
	listening   = 0x0a
	unconnected = 0x07 // UDP
)

// socket is a line of a socket table in /proc/net.
type socket struct {
	local, remote netip.AddrPort
	state         uint8
	unread        uint32
	inode         uint64
}

// tcp counts the connections that the guest opened, and lists waiting connections
// and listeners. A connection to a listening port is inbound; the host counts those
// itself.
func (h *Harness) tcp(a *guest.HealthAnswer) error {
	var all []socket
	for _, f := range []struct{ name, network string }{{"tcp", "tcp"}, {"tcp6", "tcp"}, {"udp", "udp"}, {"udp6", "udp"}} {
		socks, err := h.table(f.name)
		if errors.Is(err, os.ErrNotExist) && strings.HasSuffix(f.name, "6") {
			continue // the kernel has no IPv6
		}
		if err != nil {
			return err
		}
		for _, s := range socks {
			if f.network == "tcp" {
				all = append(all, s)
			}
			if (f.network == "tcp" && s.state == listening || f.network == "udp" && s.state == unconnected) && len(a.Listens) < guest.MaxConns {
				a.Listens = append(a.Listens, guest.ListenAddr{Network: f.network, Addr: s.local.String()})
			}
		}
	}
	ports := map[uint16]bool{}
	for _, s := range all {
		if s.state == listening {
			ports[s.local.Port()] = true
		}
	}
	for _, s := range all {
		switch open := s.state == established || s.state == closeWait || s.state == synRecv; {
		case !open || s.remote.Addr().Unmap().IsLoopback():
		case !ports[s.local.Port()]:
			if s.state == established {
				a.Outbound++
			}
		case (s.unread > 0 || s.inode == 0) && len(a.Conns) < guest.MaxConns:
			a.Conns = append(a.Conns, guest.WaitingConn{Port: s.local.Port(), Remote: s.remote.Port(), Unread: s.unread, Accepted: s.inode != 0})
		}
	}
	return nil
}

func (h *Harness) table(name string) ([]socket, error) {
	f, err := os.Open(filepath.Join(h.cfg.Proc, "net", name))
	if err != nil {
		return nil, fmt.Errorf("cannot read the sockets: %w", err)
	}
	defer f.Close()
	out, err := parseTable(io.LimitReader(f, maxTable))
	if err != nil {
		return nil, fmt.Errorf("cannot read the sockets of %s: %w", name, err)
	}
	return out, nil
}

// parseTable parses a socket table of /proc/net.
func parseTable(r io.Reader) (out []socket, err error) {
	sc := bufio.NewScanner(r)
	for n := 0; sc.Scan(); n++ {
		if n == 0 {
			continue
		}
		f := bytes.Fields(sc.Bytes())
		if len(f) < 10 {
			return nil, fmt.Errorf("line %d has %d fields, want 10 or more", n+1, len(f))
		}
		var s socket
		local, err1 := parseAddr(string(f[1]))
		remote, err2 := parseAddr(string(f[2]))
		state, err3 := strconv.ParseUint(string(f[3]), 16, 8)
		_, rx, _ := strings.Cut(string(f[4]), ":")
		unread, err4 := strconv.ParseUint(rx, 16, 32)
		inode, err5 := strconv.ParseUint(string(f[9]), 10, 64)
		if err := errors.Join(err1, err2, err3, err4, err5); err != nil {
			return nil, fmt.Errorf("line %d: %w", n+1, err)
		}
		s.local, s.remote, s.state, s.unread, s.inode = local, remote, uint8(state), uint32(unread), inode
		out = append(out, s)
	}
	return out, sc.Err()
}

// parseAddr parses an address in the kernel's format: 32-bit words in host byte
// order, which is little-endian on all supported machines.
func parseAddr(s string) (netip.AddrPort, error) {
	host, port, ok := strings.Cut(s, ":")
	p, err := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil || len(host) != 8 && len(host) != 32 {
		return netip.AddrPort{}, fmt.Errorf("%.64q is not an address", s)
	}
	var b []byte
	for i := 0; i < len(host); i += 8 {
		w, err := strconv.ParseUint(host[i:i+8], 16, 32)
		if err != nil {
			return netip.AddrPort{}, fmt.Errorf("%.64q is not an address", s)
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(w))
	}
	a, _ := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a.Unmap(), uint16(p)), nil
}

// beat sends heartbeats while the workload is active. Their absence means that it
// is idle, provided that the connection works, which the host checks with health
// calls.
func (h *Harness) beat(ctx context.Context) {
	last, at := h.health(), time.Now()
	for {
		jitter := time.Duration((rand.Float64() - 0.5) * 0.2 * float64(h.cfg.Beat))
		select {
		case <-time.After(h.cfg.Beat + jitter):
		case <-ctx.Done():
			return
		}
		now := h.health()
		window := time.Since(at)
		at = time.Now()
		if a := activity(last, now, window); a != nil && now.Running {
			if err := h.host().Notify(guest.Activity, a); err != nil {
				h.log.Warn("cannot send a heartbeat", "err", err)
			}
		}
		last = now
	}
}

// beatParams are the parameters of the activity message.
type beatParams struct {
	TCP int    `json:"tcp"`
	CPU int64  `json:"cpu_ms"`
	Net uint64 `json:"net_bytes"`
}

// activity compares two measurements that are window apart. It returns the
// heartbeat to send, or nil if nothing reached its threshold. Readings that failed
// are omitted.
func activity(a, b guest.HealthAnswer, window time.Duration) *beatParams {
	var p beatParams
	if b.TCPErr == "" {
		p.TCP = b.Outbound
	}
	if a.CPUErr == "" && b.CPUErr == "" {
		p.CPU = max(b.CPU-a.CPU, 0)
	}
	if a.NetErr == "" && b.NetErr == "" && b.Net > a.Net {
		p.Net = b.Net - a.Net
	}
	cpu := float64(p.CPU) > cpuShare*float64(window.Milliseconds())
	net := float64(p.Net) > netBytes*max(1, window.Seconds()/netWindow.Seconds())
	if p.TCP == 0 && !cpu && !net {
		return nil
	}
	return &p
}

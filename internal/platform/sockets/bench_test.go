package sockets

import (
	"net"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func addrPort(port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.IPv4Unspecified(), port) }

// BenchmarkWake measures the time from a client's write to the call of wake.
func BenchmarkWake(b *testing.B) {
	p := newPoller(b)
	took := make([]time.Duration, 0, b.N)
	woken := make(chan time.Time, 1)
	for b.Loop() {
		x, y := pair(b)
		g, err := p.Guard([]Dup{{FD: x, Kind: Stream, Name: "x"}}, func(string) { woken <- time.Now() })
		if err != nil {
			b.Fatal(err)
		}
		runtime.Gosched()
		began := time.Now()
		poke(b, y)
		took = append(took, (<-woken).Sub(began))
		g.Close()
		_ = unix.Close(y)
	}
	percentiles(b, took)
}

// BenchmarkWakeByConnect measures the time from a client's connect to the call of
// wake.
func BenchmarkWakeByConnect(b *testing.B) {
	p := newPoller(b)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	to := &unix.SockaddrInet4{Port: int(port(b, l.Addr().String())), Addr: [4]byte{127, 0, 0, 1}}
	took := make([]time.Duration, 0, b.N)
	woken := make(chan time.Time, 1)
	for b.Loop() {
		g, err := p.Guard([]Dup{{FD: dupOf(b, l.(*net.TCPListener)), Kind: Listener, Name: "x"}}, func(string) { woken <- time.Now() })
		if err != nil {
			b.Fatal(err)
		}
		c, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			b.Fatal(err)
		}
		began := time.Now()
		if err := unix.Connect(c, to); err != nil {
			b.Fatal(err)
		}
		took = append(took, (<-woken).Sub(began))
		g.Close()
		_ = unix.SetsockoptLinger(c, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		s, err := l.Accept()
		if err != nil {
			b.Fatal(err)
		}
		_ = unix.Close(c)
		_ = s.Close()
	}
	percentiles(b, took)
}

func percentiles(b *testing.B, took []time.Duration) {
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
}

// BenchmarkGuard creates and closes a guard of four sockets.
func BenchmarkGuard(b *testing.B) {
	const each = 4
	p := newPoller(b)
	x, y := pair(b)
	defer unix.Close(x)
	defer unix.Close(y)
	var opening, closing time.Duration
	b.ReportAllocs()
	for b.Loop() {
		dups := make([]Dup, each)
		for i := range dups {
			fd, err := unix.FcntlInt(uintptr(x), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				b.Fatal(err)
			}
			dups[i] = Dup{FD: fd, Kind: Stream, Name: "x"}
		}
		began := time.Now()
		g, err := p.Guard(dups, func(string) {})
		if err != nil {
			b.Fatal(err)
		}
		made := time.Now()
		g.Close()
		opening += made.Sub(began)
		closing += time.Since(made)
	}
	b.ReportMetric(float64(opening.Nanoseconds())/float64(b.N)/each, "guard-ns/fd")
	b.ReportMetric(float64(closing.Nanoseconds())/float64(b.N)/each, "close-ns/fd")
}

// BenchmarkGuardMemory measures the memory of many guards of three sockets each.
func BenchmarkGuardMemory(b *testing.B) {
	const each = 3
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		b.Fatal(err)
	}
	count := int(min(10_000, (limit.Cur-100)/each))
	x, y := pair(b)
	defer unix.Close(x)
	defer unix.Close(y)
	for b.Loop() {
		p := newPoller(b)
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		goroutines := runtime.NumGoroutine()
		guards := make([]*Guard, count)
		for i := range guards {
			var dups [each]Dup
			for j := range dups {
				fd, err := unix.FcntlInt(uintptr(x), unix.F_DUPFD_CLOEXEC, 0)
				if err != nil {
					b.Fatal(err)
				}
				dups[j] = Dup{FD: fd, Kind: Stream, Name: "x"}
			}
			var err error
			if guards[i], err = p.Guard(dups[:], func(string) {}); err != nil {
				b.Fatal(err)
			}
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		if now := runtime.NumGoroutine(); now > goroutines {
			b.Errorf("%d goroutines, %d before the guards", now, goroutines)
		}
		b.ReportMetric(float64(count), "guards")
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(count), "B/guard")
		for _, g := range guards {
			g.Close()
		}
	}
}

// BenchmarkDump lists 1,000 connected sockets and a listener: first all with
// their traffic, then those of one port.
func BenchmarkDump(b *testing.B) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	for range 500 {
		c, err := net.Dial("tcp4", l.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		s, err := l.Accept()
		if err != nil {
			b.Fatal(err)
		}
		defer s.Close()
	}
	for _, q := range []struct {
		name string
		q    Query
	}{
		{"all", Query{}},
		{"all with traffic", Query{Info: true}},
		{"listeners", Query{States: []State{Listen}}},
		{"one port with traffic", Query{LocalPorts: []uint16{port(b, l.Addr().String())}, Info: true}},
		{"nothing", Query{LocalPorts: []uint16{1}}},
	} {
		b.Run(q.name, func(b *testing.B) {
			b.ReportAllocs()
			var n int
			for b.Loop() {
				n = len(list(b, q.q))
			}
			b.ReportMetric(float64(n), "sockets")
		})
	}
	b.Run("proc", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := procNet(Query{}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

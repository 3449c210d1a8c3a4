// Relay compares the relay of internal/relay with systemd-socket-proxyd, HAProxy
// and a plain Go proxy (io.Copy), on loopback, in one run.
//
// Each proxy is its own process in front of the same backend. Rounds visit the
// proxies in one order and then in reverse order, so that drift of the machine
// cancels out. The table shows medians over the rounds. The ratio is the median
// of the ratios within each round.
//
// It needs the Debian packages systemd and haproxy; a proxy that is not installed
// is named and omitted.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

type settings struct {
	rounds  int
	slice   time.Duration
	clients int
	only    string
	profile string
}

func main() {
	var s settings
	role := flag.String("role", "", "internal: backend, plain or router")
	to := flag.String("to", "", "internal: where the role connects to")
	flag.IntVar(&s.rounds, "rounds", 8, "rounds per measurement, each in alternating order")
	flag.DurationVar(&s.slice, "slice", 400*time.Millisecond, "time of one measurement of one proxy")
	flag.IntVar(&s.clients, "clients", 8, "clients at the same time")
	flag.StringVar(&s.only, "only", "", "one measurement: connections, requests or throughput")
	flag.StringVar(&s.profile, "cpuprofile", "", "write a CPU profile of the router's process here")
	flag.IntVar(&loopsFlag, "loops", 0, "event loops of the router; 0 is its default")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if *role != "" {
		err = play(ctx, *role, *to, s.profile)
	} else {
		err = compare(ctx, s)
	}
	if err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

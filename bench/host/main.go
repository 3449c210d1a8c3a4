// Host measures what lull costs a program that it manages: on the direct path
// compared with the program alone, at a wake, and with thousands of paused
// programs.
//
// Every figure has a baseline from the same run. Pairs are measured in ABBA
// order, so that drift of the machine cancels out. It starts its own daemon with
// a fresh directory and leaves nothing behind.
//
// It needs Go, and for some parts Debian's strace (to count the daemon's system
// calls) and gcc (to build a minimal program). A part whose program is missing is
// named and omitted. bench/relay compares the relay with other proxies.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

type settings struct {
	pairs     int
	slice     time.Duration
	clients   int
	wakes     int
	instances int
	quiet     time.Duration
	freezes   int
	cold      string
	beside    int
	against   string
	cycles    int
	running   int
	bin       string
}

type part struct {
	name, what string
	run        func(context.Context, settings) error
}

var parts = []part{
	{"direct", "direct path beside the bare program", directPart},
	{"calls", "system calls of the daemon for each connection", callsPart},
	{"wake", "first byte of a paused program beside a running one", wakePart},
	{"cold", "the same after a silence of the whole host", coldPart},
	{"freeze", "from the deadline to frozen", freezePart},
	{"cycle", "the daemon's CPU per pause and wake, and per probe", cyclePart},
	{"asleep", "many paused instances", asleepPart},
}

func main() {
	var s settings
	only := flag.String("part", "", "comma-separated parts to run: direct, calls, wake, cold, freeze, cycle, asleep; empty is all")
	role := flag.String("serve", "", "internal: be the program, on this address")
	flag.IntVar(&s.pairs, "pairs", 20, "pairs of the direct path, in ABBA order")
	flag.DurationVar(&s.slice, "slice", 300*time.Millisecond, "time of one measurement")
	flag.IntVar(&s.clients, "clients", 8, "clients at the same time")
	flag.IntVar(&s.wakes, "wakes", 2000, "wakes to measure")
	flag.IntVar(&s.instances, "instances", 10000, "paused instances; fewer where limits forbid so many")
	flag.DurationVar(&s.quiet, "quiet", 20*time.Second, "how long paused instances are watched")
	flag.IntVar(&s.freezes, "freezes", 100, "natural pauses to measure")
	flag.StringVar(&s.cold, "cold", "600ms=60,10s=60,60s=30", "silences, and how many connections to paused and to bare programs are measured after each")
	flag.IntVar(&s.beside, "beside", 10, "programs that are silent side by side for a long silence; with 1 the whole host is silent")
	flag.StringVar(&s.against, "against", "", "folder with other builds of lull and lull-shim, which the part cold measures beside these")
	flag.IntVar(&s.cycles, "cycles", 50, "pauses and wakes to measure, without and with other connections")
	flag.IntVar(&s.running, "running", 1000, "running, idle instances")
	others := flag.Int("crowd", 0, "internal: hold this number of connections until the input ends")
	flag.StringVar(&s.bin, "bin", "", "folder with lull and lull-shim; empty builds them")
	flag.Parse()
	if *role != "" {
		fail(serve(*role))
		return
	}
	if *others > 0 {
		fail(beCrowd(*others))
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	fail(runParts(ctx, s, *only))
}

func fail(err error) {
	if err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func runParts(ctx context.Context, s settings, only string) error {
	want := strings.Split(only, ",")
	for _, w := range want {
		if w != "" && !slices.ContainsFunc(parts, func(p part) bool { return p.name == w }) {
			return fmt.Errorf("unknown part %q", w)
		}
	}
	began := time.Now()
	if err := programs.build(s.bin); err != nil {
		return err
	}
	defer programs.remove()
	for _, p := range parts {
		if only != "" && !slices.Contains(want, p.name) {
			continue
		}
		fmt.Printf("## %s: %s\n", p.name, p.what)
		if err := p.run(ctx, s); err != nil {
			return fmt.Errorf("cannot measure %s: %w", p.name, err)
		}
		fmt.Println()
	}
	fmt.Printf("total time %s\n", time.Since(began).Round(time.Second))
	return nil
}

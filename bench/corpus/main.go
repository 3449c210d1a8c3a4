// Command corpus records the building blocks of test/corpus: the resources that
// real programs use per second, with and without a scripted client.
//
// For each recipe it starts the program in its own CPU accounting group, waits
// until it is up, and records for the duration -for: the CPU time of the group,
// the bytes that its processes read from and write to disks, the bytes on the
// connections of the scripted client, how many of those are open, and whether the
// program's terminal has input or output. A recording is a gzipped file of
// columns in -to. The program needs root and control groups version 1.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	span := flag.Duration("for", 150*time.Second, "how long to record each")
	to := flag.String("to", "test/corpus/testdata", "folder of the recordings")
	only := flag.String("only", "", "record only these, separated by commas")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := recordAll(ctx, *span, *to, *only); err != nil {
		fmt.Fprintln(os.Stderr, "corpus:", err)
		os.Exit(1)
	}
}

// side is the number of recipes recorded at the same time. Most of them are idle.
const side = 12

func recordAll(ctx context.Context, span time.Duration, to, only string) error {
	wanted := strings.FieldsFunc(only, func(r rune) bool { return r == ',' })
	places := make(chan struct{}, side)
	var all sync.WaitGroup
	var mu sync.Mutex
	failed := []string{}
	for _, r := range recipes() {
		if len(wanted) > 0 && !slices.Contains(wanted, r.name) {
			continue
		}
		all.Go(func() {
			places <- struct{}{}
			defer func() { <-places }()
			rows, err := record(ctx, r, span)
			if err == nil {
				err = write(filepath.Join(to, r.name+".csv.gz"), rows)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = append(failed, r.name+": "+err.Error())
			}
			fmt.Println(r.name, len(rows), summary(rows), err)
		})
	}
	all.Wait()
	if len(failed) > 0 {
		return fmt.Errorf("not recorded: %s", strings.Join(failed, "; "))
	}
	return nil
}

package process_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"lull/internal/core/instance"
	"lull/internal/lib/waittest"
	"lull/internal/runtime/process"
)

// overwrites is a program that overwrites its whole environment, as nginx and Redis
// do to set their process titles.
const overwrites = `
import time
f = open('/proc/self/stat').read().rsplit(')', 1)[1].split()
begin, end = int(f[47]), int(f[48])
with open('/proc/self/mem', 'r+b', buffering=0) as m:
    m.seek(begin)
    m.write(b'title: ' + b'x' * (end - begin - 7))
print('written', flush=True)
time.sleep(1000)
`

// TestExecAfterATitle checks that a command beside a program that has overwritten
// its environment gets the environment with which the program was started, also
// from the next daemon.
func TestExecAfterATitle(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is missing")
	}
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		l := h.launch("main", 1, python, "-c", overwrites)
		l.Env = append(l.Env, "COLOUR=red")
		w := h.start(l)
		pid := w.Identity().PID
		waittest.Until(t, "the program writes over its environment", func() bool {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
			return err == nil && strings.HasPrefix(string(b), "title: ")
		})
		for _, daemon := range []string{"first", "next"} {
			if daemon == "next" {
				h.close()
				h.open()
				if _, err := h.rt.Adopt(waittest.Context(t), "main", w.Identity()); err != nil {
					t.Fatal(err)
				}
			}
			got, err := h.exec(waittest.Context(t), "main", instance.Command{Command: []string{"sh", "-c", "echo $COLOUR; env"}})
			if err != nil {
				t.Fatal(err)
			}
			if !strings.HasPrefix(got.Stdout, "red\n") || !strings.Contains(got.Stdout, "\nPATH=") || strings.Contains(got.Stdout, "xxxx") {
				t.Errorf("the %s daemon's Exec() = %+v", daemon, got)
			}
		}
	})
}

package lockfile

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"lull/internal/lib/errtest"
)

// TestMain also acts as the holder: a process that has the lock and uses much
// memory.
func TestMain(m *testing.M) {
	if path := os.Getenv("LULL_TEST_LOCK"); path != "" {
		f, err := Take(path)
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		memory := make([]byte, 512<<20)
		for n := 0; n < len(memory); n += 4096 {
			memory[n] = 1
		}
		fmt.Println("held")
		_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends
		f.Close()
		os.Exit(int(memory[4096]))
	}
	os.Exit(m.Run())
}

// TestTake checks that a living process keeps the lock and is named in the
// error, and that a killed one releases it immediately.
func TestTake(t *testing.T) {
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	path := filepath.Join(t.TempDir(), "lock")
	for range 3 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "LULL_TEST_LOCK="+path)
		in, err := cmd.StdinPipe()
		errtest.None(t, err)
		defer in.Close()
		out, err := cmd.StdoutPipe()
		errtest.None(t, err)
		errtest.None(t, cmd.Start())
		said, err := bufio.NewReader(out).ReadString('\n')
		if said != "held\n" {
			t.Fatalf("the holder says %q, %v", said, err)
		}
		var held *HeldError
		if f, err := Take(path); !errors.As(err, &held) || held.PID != cmd.Process.Pid || f != nil {
			t.Errorf("beside process %d: %v", cmd.Process.Pid, err)
		}
		errtest.None(t, cmd.Process.Kill())
		f, err := Take(path)
		if err != nil {
			t.Fatalf("right after its holder was killed: %v", err)
		}
		if _, err := Take(path); !errors.As(err, &held) || held.PID != os.Getpid() {
			t.Errorf("twice: %v", err)
		}
		errtest.None(t, f.Close())
		_ = cmd.Wait() // returns an error because it was killed
	}
}

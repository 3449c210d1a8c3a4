// Package gpu reads how busy the NVIDIA GPUs of a machine are, through
// nvidia-smi and only if a device node exists.
//
// A machine without a device node has no GPU: the reading is absent and nothing
// is run. Otherwise the busiest GPU in several samples counts, because a single
// sample misses bursts. If the program is missing, fails, hangs or prints
// something other than a number (a GPU with MIG slices prints N/A), the reading
// is unknown, never quiet. Read outlives its context only for a moment, even if
// the driver does not let the program die.
//
// It does not read GPUs of other makers, nor memory that is allocated but idle.
package gpu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"lull/internal/core/idle"
)

// Signal is the name of the GPU signal.
const Signal = "gpu"

// Reader runs nvidia-smi. The zero value reads the live machine.
type Reader struct {
	Dev     string        // directory of the device nodes; empty means /dev
	Command string        // empty means nvidia-smi, from PATH
	Samples int           // 0 means 3
	Every   time.Duration // interval between samples; 0 means 500 ms
}

// Read returns the highest utilization, in percent, of any GPU in any sample.
// It is safe for concurrent use.
func (r *Reader) Read(ctx context.Context, now time.Time, threshold float64) idle.Reading {
	if ok, err := r.present(); err != nil {
		return idle.NotKnown(Signal, now, "cannot detect a GPU: "+err.Error())
	} else if !ok {
		return idle.Reading{Signal: Signal, State: idle.Absent, At: now, Detail: "no GPU"}
	}
	samples, every := r.Samples, r.Every
	if samples <= 0 {
		samples = 3
	}
	if every <= 0 {
		every = 500 * time.Millisecond
	}
	highest := -1.0
	for i := range samples {
		if i > 0 {
			select {
			case <-time.After(every):
			case <-ctx.Done():
				return idle.NotKnown(Signal, now, "cannot read the GPU: "+ctx.Err().Error())
			}
		}
		out, err := r.run(ctx)
		if err != nil {
			return idle.NotKnown(Signal, now, err.Error())
		}
		v, err := Parse(out)
		if err != nil {
			return idle.NotKnown(Signal, now, err.Error())
		}
		if highest = max(highest, v); highest >= threshold {
			break // already active; more samples change nothing
		}
	}
	return idle.Judge(Signal, highest, threshold, "%", time.Duration(samples-1)*every, now)
}

// present reports whether the device node of a GPU exists.
func (r *Reader) present() (bool, error) {
	dev := r.Dev
	if dev == "" {
		dev = "/dev"
	}
	found, err := filepath.Glob(filepath.Join(dev, "nvidia[0-9]*"))
	if err != nil {
		return false, err
	}
	if len(found) > 0 {
		return true, nil
	}
	_, err = os.Stat(filepath.Join(dev, "nvidiactl"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// outputMax bounds the output: 16 GPUs need 100 bytes.
const outputMax = 64 << 10

func (r *Reader) run(ctx context.Context) ([]byte, error) {
	name := r.Command
	if name == "" {
		name = "nvidia-smi"
	}
	cmd := exec.Command(name, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var out, fault bounded
	cmd.Stdout, cmd.Stderr = &out, &fault
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("cannot run %s: %w", name, err)
	}
	ended := make(chan error, 1)
	// This goroutine may wait forever for a driver that hangs, but the caller
	// does not. The agent takes no new reading until it has ended.
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			return nil, fmt.Errorf("cannot run %s: %w: %.200s", name, err, strings.TrimSpace(fault.String()+out.String()))
		}
		return out.Bytes(), nil
	case <-ctx.Done():
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		return nil, fmt.Errorf("cannot run %s: it did not answer in time", name)
	}
}

// bounded is a buffer that keeps the first outputMax bytes and discards the rest.
type bounded struct{ bytes.Buffer }

func (b *bounded) Write(p []byte) (int, error) {
	if room := outputMax - b.Len(); room > 0 {
		b.Buffer.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

// Parse returns the highest percentage in nvidia-smi's output, which has one
// number per line.
func Parse(out []byte) (float64, error) {
	highest := -1.0
	for line := range strings.Lines(string(out)) {
		text := strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(line), "%"))
		if text == "" {
			continue
		}
		v, err := strconv.ParseFloat(text, 64)
		if err != nil || v != v || v < 0 || v > 100 {
			return 0, fmt.Errorf("cannot read a GPU's utilization from %.60q", text)
		}
		highest = max(highest, v)
	}
	if highest < 0 {
		return 0, errors.New("cannot read a GPU's utilization: nvidia-smi names no GPU")
	}
	return highest, nil
}

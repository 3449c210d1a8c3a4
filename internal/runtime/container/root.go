package container

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"lull/internal/platform/proc"
)

// maxState bounds the state file that runc keeps of a container, in bytes.
const maxState = 4 << 20

// Root implements instance.Rooted: it opens the root directory of the container's
// first process, which runc records with its start time.
func (r *Runtime) Root(id string) (*os.File, error) {
	f, err := os.Open(filepath.Join(r.state(), id, "state.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errors.New("it does not run: start it first")
	}
	if err != nil {
		return nil, fmt.Errorf("read the state of the container: %w", err)
	}
	defer f.Close()
	var state struct {
		PID   int    `json:"init_process_pid"`
		Start uint64 `json:"init_process_start"`
	}
	if err := json.NewDecoder(io.LimitReader(f, maxState)).Decode(&state); err != nil {
		return nil, fmt.Errorf("read the state of the container: %w", err)
	}
	root, err := os.OpenFile(fmt.Sprintf("/proc/%d/root", state.PID), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, errors.New("it has just ended: start it first")
	}
	// Only now it is certain that the PID was not another program's.
	if s, err := proc.Live().Stat(state.PID); err != nil || s.Start != state.Start {
		root.Close()
		return nil, errors.New("it has just ended: start it first")
	}
	return root, nil
}

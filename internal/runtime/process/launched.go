package process

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"lull/internal/core/instance"
	"lull/internal/lib/segment"
)

// launched is the environment in which an instance's program was started; commands
// beside it get the same. It is stored because programs such as nginx and Redis
// overwrite the memory that /proc/PID/environ shows. It is seldom needed, so it is in
// memory only if it could not be written.
type launched struct {
	Run uint64   `json:"run"`
	Env []string `json:"env"`
	Dir string   `json:"dir"`
}

// maxLaunched bounds the size of the file of a launched, in bytes.
const maxLaunched = 1 << 20

func (r *Runtime) launchedFile(id string) string {
	return filepath.Join(r.cfg.Dir, "launched-"+id+".json")
}

// noteLaunch stores the environment of a run on disk for later daemons.
func (r *Runtime) noteLaunch(l instance.Launch) error {
	n := launched{Run: l.Run, Dir: l.Dir}
	for _, e := range l.Env {
		if !strings.HasPrefix(e, "LISTEN_") { // these are for the main process
			n.Env = append(n.Env, e)
		}
	}
	b, err := json.Marshal(n)
	if err == nil {
		err = segment.WriteFile(r.launchedFile(l.ID), b, 0o600)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if delete(r.launches, l.ID); err != nil {
		r.launches[l.ID] = n
	}
	return err
}

// launchOf returns what noteLaunch stored for a run, or an error if nothing is
// stored.
func (r *Runtime) launchOf(id string, run uint64) (launched, error) {
	r.mu.Lock()
	n, ok := r.launches[id]
	r.mu.Unlock()
	if !ok {
		b, err := os.ReadFile(r.launchedFile(id))
		if err != nil {
			return n, err
		}
		if len(b) > maxLaunched {
			return n, fmt.Errorf("cannot use %s: it has more than %d bytes", r.launchedFile(id), maxLaunched)
		}
		if err := json.Unmarshal(b, &n); err != nil {
			return n, fmt.Errorf("cannot use %s: %w", r.launchedFile(id), err)
		}
	}
	if n.Run != run {
		return n, fmt.Errorf("the environment of run %d of %s was not stored", run, id)
	}
	return n, nil
}

func (r *Runtime) forgetLaunch(id string) {
	r.mu.Lock()
	delete(r.launches, id)
	r.mu.Unlock()
	if err := os.Remove(r.launchedFile(id)); err != nil && !os.IsNotExist(err) {
		r.cfg.Log.Warn("cannot remove the environment of an instance", "instance", id, "err", err)
	}
}

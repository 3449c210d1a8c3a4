//go:build linux && !portable

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"lull/internal/cli/term"
	"lull/internal/platform/cgroup"
	"lull/internal/platform/oci"
	"lull/internal/runtime/container"
	"lull/internal/runtime/docker"
	"lull/internal/runtime/process"
)

// newContainers returns the container runtime on top of the process runtime. The
// error names a missing prerequisite.
func newContainers(cfg hostConfig, images *oci.Store, rt *process.Runtime) (*container.Runtime, error) {
	if err := container.Check(rt); err != nil {
		return nil, err
	}
	socket := guestPath(cfg.Socket)
	guests := strings.TrimSuffix(socket, ".sock") + ".d"
	if err := shareGuests(guests, socket); err != nil {
		return nil, err
	}
	return container.New(container.Config{Dir: filepath.Join(cfg.Data, "containers"), Process: rt, Images: images, Guests: guests})
}

// shareGuests creates LULL_SOCKET in a directory of its own, which is mounted into
// containers. A later daemon creates its socket in the same directory, so containers
// see that too.
func shareGuests(dir, socket string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("cannot create the directory of LULL_SOCKET for containers: %w", err)
	}
	at := filepath.Join(dir, guestSocket)
	if err := os.Remove(at); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("cannot replace %s: %w", at, err)
	}
	if err := os.Link(socket, at); err != nil {
		return fmt.Errorf("cannot share LULL_SOCKET with containers: %w", err)
	}
	return nil
}

// containerFindings checks the prerequisites of containers and of Docker.
func containerFindings(ctx context.Context, cfg hostConfig) (l term.Findings) {
	runc, err := container.Find("")
	l.Optional("container: runc", err, runc, "apt-get install runc")
	if err == nil {
		l.Optional("container: system call filter", container.Filters(runc), "present", "use runc with libseccomp on a kernel with seccomp; until then, containers run unfiltered")
	}
	_, err = cgroup.Find("doctor")
	if os.Geteuid() != 0 {
		err = errors.New("lull host is not root here")
	}
	l.Optional("container: root and control groups", err, "present", "run lull host as root, on a machine with control groups")
	socket := cfg.Docker
	if socket == "" {
		socket = dockerSocket
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	version, err := docker.Ping(ctx, socket)
	do := "apt-get install docker.io"
	if _, ferr := docker.Find(); ferr == nil {
		do = "systemctl start docker"
	}
	l.Optional("docker: daemon", err, version+" at "+socket, do+", or set its socket with --docker=PATH; lull host --docker takes over containers with the label "+docker.LabelPauseAfter)
	return l
}

package microvm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"lull/internal/core/instance"
)

// Files of a hibernated guest other than its memory. The manifest is written last
// and removed first. While it exists, memory and state belong together, and no QEMU
// has run since.
const (
	stateFile    = "state"
	manifestFile = "hibernated.json"
)

// manifestVersion must change whenever restoring needs something new.
const manifestVersion = 4

// manifest records what a saved guest depends on.
type manifest struct {
	Version int       `json:"version"`
	At      time.Time `json:"at"`
	QEMU    string    `json:"qemu"`   // version
	Kernel  string    `json:"kernel"` // digest
	// Machine is a digest of the machine's configuration for QEMU, including the
	// host's CPU if the guest sees that.
	Machine string `json:"machine"`
	State   int64  `json:"state_bytes"`
	Digest  string `json:"state_sha256"`
	Memory  int64  `json:"memory_bytes"`
	Root    string `json:"root,omitempty"`  // size and modification time of the image
	Layer   string `json:"layer,omitempty"` // the same for the guest's own disk, which must not be written before the restore
	// Template is the guest from whose template a clone's memory comes (clone.go).
	// Full means that the state includes the memory: the guest was a clone, so
	// there is no file with it.
	Template string `json:"template,omitempty"`
	Full     bool   `json:"full,omitempty"`
	// Vsock reports whether the machine has a vsock device. Its CID may change.
	Vsock bool `json:"vsock,omitempty"`
}

// Hibernated reports whether the guest exists only on disk.
func (w *Work) Hibernated() bool { return w.hibernated() }

// Hibernate saves a frozen guest to disk and ends its QEMU. It returns the number
// of bytes on disk, once they are durable. On an error the guest stays frozen. Thaw
// restores the guest. The guest's network stays in this daemon, so open connections
// continue after the thaw unless the daemon is replaced.
func (w *Work) Hibernate(ctx context.Context) (saved int64, err error) {
	if w.hibernated() {
		return 0, errors.New("cannot hibernate: the guest is already hibernated")
	}
	if !w.isFrozen() {
		return 0, errors.New("cannot hibernate: the guest is not frozen")
	}
	m, err := w.monitor()
	if err != nil {
		return 0, err
	}
	free, err := w.reserveToSave()
	if err != nil {
		return 0, err
	}
	defer free()
	man, err := w.binding(m)
	if err != nil {
		return 0, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, removeAll(w.path(manifestFile), w.path(stateFile)))
		}
	}()
	// A saved guest must not be continued, because what it did then would be lost.
	if w.r.cfg.WhenGone != nil {
		if err := w.r.cfg.WhenGone(ctx, w.id, ""); err != nil {
			return 0, fmt.Errorf("cannot save the guest: %w", err)
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, w.heed(context.WithoutCancel(ctx)))
			}
		}()
	}
	w.takeConsole(ctx)
	ports := w.ports
	ports.hold()
	defer ports.open()
	began := time.Now()
	state, err := w.saveState(ctx, m)
	if err != nil {
		return 0, fmt.Errorf("cannot save the guest: %w", err)
	}
	written := time.Now()
	if err := errors.Join(state.Sync(), state.Close(), w.commit(&man)); err != nil {
		return 0, fmt.Errorf("cannot save the guest: %w", err)
	}
	w.r.log.Debug("saved", "instance", w.id, "written", written.Sub(began), "durable", time.Since(written))
	w.dropQEMU(ctx)
	return man.State + man.Memory, nil
}

// saveState saves everything but the memory, which is already in a file. The
// returned file may not be durable yet.
func (w *Work) saveState(ctx context.Context, m *monitor) (f *os.File, err error) {
	if f, err = os.OpenFile(w.path(stateFile), os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	// Each answer means that QEMU's main loop has run once and has flushed pending
	// output to the ports' sockets, from which nothing is read now.
	for range 3 {
		if _, err := m.status(ctx); err != nil {
			return f, err
		}
	}
	return f, m.stream(ctx, "migrate", w.rec.Template == "", f)
}

// ignoreShared sets whether memory that is mapped from a file is left out of the
// state.
func (m *monitor) ignoreShared(on bool) (finish func(ctx context.Context, result any) error) {
	type capability struct {
		Name string `json:"capability"`
		On   bool   `json:"state"`
	}
	return m.begin("migrate-set-capabilities", map[string]any{"capabilities": []capability{{"x-ignore-shared", on}}}, nil)
}

// stream makes QEMU save its state to f or, if command is "migrate-incoming", load
// it from f. It disables the guest's network announcement after a migration: the
// guest has not moved, and announcing would delay its first client.
func (m *monitor) stream(ctx context.Context, command string, ignoreShared bool, f *os.File) error {
	var errs []error
	for _, finish := range []func(context.Context, any) error{
		m.ignoreShared(ignoreShared),
		m.begin("migrate-set-parameters", map[string]int{"announce-rounds": 0}, nil),
		m.begin("getfd", map[string]string{"fdname": "state"}, f),
		m.begin(command, map[string]string{"uri": "fd:state"}, nil),
	} {
		errs = append(errs, finish(ctx, nil))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return m.migrated(ctx)
}

// migrated waits until a migration has ended.
func (m *monitor) migrated(ctx context.Context) error {
	for {
		var s struct {
			Status string `json:"status"`
			Desc   string `json:"error-desc"`
		}
		if err := m.do(ctx, "query-migrate", nil, &s); err != nil {
			return err
		}
		switch s.Status {
		case "completed":
			return nil
		case "failed", "cancelled":
			return fmt.Errorf("QEMU's migration is %s: %s", s.Status, s.Desc)
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("QEMU's migration did not finish: %w", context.Cause(ctx))
		}
	}
}

// commit makes the memory and the guest's disk durable, then writes the
// manifest.
func (w *Work) commit(man *manifest) (err error) {
	if man.Full = w.rec.Template != ""; !man.Full {
		if man.Memory, err = syncMemory(w.path(memoryFile)); err != nil {
			return err
		}
	}
	if man.Digest, man.State, err = digest(w.path(stateFile)); err != nil {
		return err
	}
	if w.rec.Layer {
		if err := syncPath(w.r.layer(w.id)); err != nil {
			return err
		}
		if man.Layer, err = w.r.layerState(w.id, w.rec); err != nil {
			return err
		}
	}
	man.At = time.Now()
	w.endMu.Lock()
	defer w.endMu.Unlock()
	if w.ended {
		return errors.New("QEMU has ended")
	}
	if err := man.write(w.r.dir(w.id)); err != nil {
		return err
	}
	w.setSaved(true) // from now on the guest counts as saved, whatever happens to QEMU
	return nil
}

func (w *Work) setSaved(on bool) {
	w.mu.Lock()
	w.saved = on
	w.mu.Unlock()
}

// syncMemory makes a guest's memory file durable and returns its size.
func syncMemory(path string) (int64, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	st, err := f.Stat()
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return 0, err
	}
	return st.Size(), nil
}

// write stores the manifest in an instance's directory, durably and atomically.
func (man *manifest) write(dir string) error {
	b, err := json.Marshal(man)
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, manifestFile+".new")
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	if err := errors.Join(syncPath(tmp), os.Rename(tmp, filepath.Join(dir, manifestFile))); err != nil {
		return err
	}
	return syncPath(dir)
}

// dropQEMU ends the QEMU of a guest that has been saved.
func (w *Work) dropQEMU(ctx context.Context) {
	w.mu.Lock()
	w.ident.PID, w.ident.Start = 0, 0
	w.mu.Unlock()
	w.qcancel()
	<-w.over // supervise must have returned, or it would take this for the end of the run
	w.disconnect()
	kctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	if err := w.proc.kill(kctx); err != nil {
		w.r.log.Error("cannot end QEMU after hibernation", "instance", w.id, "err", err)
	}
	<-w.gone
	w.renew()
}

// binding returns what the guest would depend on if it were saved now.
func (w *Work) binding(m *monitor) (manifest, error) {
	man := manifest{Version: manifestVersion, QEMU: m.version(), Vsock: w.rec.CID != 0}
	return man, w.r.bindMachine(&man, w.id, w.rec)
}

// bindMachine adds the machine's configuration, and the files on which it depends,
// to man.
func (r *Runtime) bindMachine(man *manifest, id string, rec runRecord) error {
	rec.Template, rec.CID = "", min(rec.CID, 1) // these may differ at each start
	sum := sha256.New()
	for _, a := range r.arguments("", rec.restored())[2:] { // without QEMU's name
		fmt.Fprintln(sum, a)
	}
	if rec.Accel == KVM {
		fmt.Fprintln(sum, r.files.processor())
	}
	man.Machine = hex.EncodeToString(sum.Sum(nil))
	return r.bindFiles(man, id, rec)
}

// bindFiles adds the files on which a saved guest depends to man.
func (r *Runtime) bindFiles(man *manifest, id string, rec runRecord) (err error) {
	if r.Missing() != nil { // what the guest depends on cannot be determined
		return r.Missing()
	}
	if man.Kernel, err = r.sum.of(r.parts().kernel.Image); err != nil {
		return err
	}
	if rec.Root != "" {
		st, err := os.Stat(rec.Root)
		if err != nil {
			return fmt.Errorf("cannot find the root image: %w", err)
		}
		man.Root = fmt.Sprintf("%d bytes of %s", st.Size(), st.ModTime().Format(time.RFC3339Nano))
	}
	man.Layer, err = r.layerState(id, rec)
	return err
}

// fits returns an error if the guest cannot be restored with what there is now.
func (man *manifest) fits(now manifest) error {
	for _, c := range []struct{ what, was, is string }{
		{"QEMU", man.QEMU, now.QEMU}, {"machine", man.Machine, now.Machine}, {"kernel", man.Kernel, now.Kernel}, {"root image", man.Root, now.Root},
		{"state of its own disk", man.Layer, now.Layer},
	} {
		if c.was != c.is {
			return &instance.SnapshotError{Reason: fmt.Sprintf("it was saved with another %s (%s, now %s)", c.what, c.was, c.is)}
		}
	}
	if man.Vsock != now.Vsock {
		return &instance.SnapshotError{Reason: fmt.Sprintf("vsock device when it was saved: %t, now: %t", man.Vsock, now.Vsock)}
	}
	return nil
}

// readManifest returns the manifest in dir, or nil if the guest is not hibernated.
func readManifest(dir string) (*manifest, error) {
	b, err := os.ReadFile(filepath.Join(dir, manifestFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("cannot read how a guest was saved: %w", err)
	}
	var m manifest
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, &instance.SnapshotError{Reason: "its manifest is damaged: " + err.Error()}
	}
	return &m, nil
}

// restore starts a QEMU that restores a hibernated guest and leaves it frozen.
func (w *Work) restore(ctx context.Context) (err error) {
	if w.r.Missing() != nil {
		return w.r.Missing()
	}
	man, err := readManifest(w.r.dir(w.id))
	if err != nil {
		return err
	}
	if man == nil {
		return &instance.SnapshotError{Reason: "its manifest is missing"}
	}
	if err := w.checkMemory(man); err != nil {
		return err
	}
	if err := w.checkVsock(man); err != nil {
		return err
	}
	free, err := w.reserveToRestore(man)
	if err != nil {
		return err
	}
	defer free()
	state, err := os.Open(w.path(stateFile))
	if err != nil {
		return &instance.SnapshotError{Reason: "its state cannot be read: " + err.Error()}
	}
	defer state.Close()
	if man.Full && w.rec.Template != "" { // once restored, it has its own memory
		w.rec.Template = ""
		if err := writeRecord(w.r.dir(w.id), w.rec); err != nil {
			return err
		}
	}
	began := time.Now()
	w.waking.Store(true)
	if err := w.launch(w.rec.restored()); err != nil {
		return err
	}
	defer func() {
		if err != nil { // the guest is still hibernated
			w.dropQEMU(ctx)
		}
	}()
	if err := w.checkState(man); err != nil { // runs while QEMU is starting
		return err
	}
	if err := w.connect(ctx); err != nil {
		return w.explain(ctx, w.endOf(ctx, err))
	}
	m, err := w.monitor()
	if err != nil {
		return err
	}
	now, err := w.binding(m)
	if err != nil {
		return err
	}
	if err := man.fits(now); err != nil {
		return err
	}
	up := time.Now()
	if err := m.stream(ctx, "migrate-incoming", !man.Full, state); err != nil {
		return w.refused(ctx, err)
	}
	read := time.Now()
	if err := w.uncommit(); err != nil {
		return fmt.Errorf("cannot take a guest out of hibernation: %w", err)
	}
	if err := os.Remove(w.path(stateFile)); err != nil {
		w.r.log.Warn("cannot remove the state of a guest that runs again", "instance", w.id, "err", err)
	}
	w.moveToVsock()
	w.r.log.Debug("restored", "instance", w.id, "qemu_up", up.Sub(began), "state_read", read.Sub(up), "recorded", time.Since(read))
	return nil
}

// uncommit removes the manifest, because the guest's memory is about to change and
// will no longer match the state.
func (w *Work) uncommit() error {
	w.endMu.Lock()
	defer w.endMu.Unlock()
	if w.isGone() { // supervise has found the guest hibernated, so the manifest must stay
		return errors.New("QEMU has ended")
	}
	if err := errors.Join(os.Remove(w.path(manifestFile)), syncPath(w.r.dir(w.id))); err != nil {
		return err
	}
	w.setSaved(false)
	return nil
}

// refused returns an error for a guest's state that QEMU did not accept. If QEMU
// failed to read the state, it would fail again: the error is an
// *instance.SnapshotError, and the guest must boot. If QEMU was killed, or this
// machine was short of resources, the state is still good.
func (w *Work) refused(ctx context.Context, err error) error {
	err = w.endOf(ctx, err)
	w.mu.Lock()
	gaveUp := w.exited && w.status.Exited()
	w.mu.Unlock()
	err = w.explain(ctx, err)
	if short := shortage(err.Error()); short != "" {
		return fmt.Errorf("this machine has too little memory for it (%s); the restore is retried: %w", short, err)
	}
	if gaveUp {
		return &instance.SnapshotError{Reason: "QEMU cannot load its state: " + err.Error()}
	}
	return err
}

// endOf adds to err which signal ended the QEMU of a restore, if one did.
func (w *Work) endOf(ctx context.Context, err error) error {
	select { // QEMU exits after a failure
	case <-w.gone:
	case <-time.After(time.Second):
	case <-ctx.Done():
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.exited || !w.status.Signaled() {
		return err
	}
	sig := w.status.Signal()
	hint := w.diskFull(sig)
	if sig == syscall.SIGKILL {
		hint = ", as the kernel does when memory is short"
	}
	return fmt.Errorf("QEMU was killed by signal %d (%s)%s: %w", sig, sig, hint, err)
}

// shortage returns the resource that QEMU lacked according to its output, or "" for
// any other error.
func shortage(said string) string {
	said = strings.ToLower(said)
	for _, e := range []syscall.Errno{syscall.ENOMEM, syscall.ENOSPC, syscall.EDQUOT, syscall.EMFILE, syscall.ENFILE, syscall.EAGAIN} {
		if words := e.Error(); strings.Contains(said, words) {
			return words
		}
	}
	if strings.Contains(said, "failed to allocate") || strings.Contains(said, "out of memory") {
		return syscall.ENOMEM.Error()
	}
	return ""
}

// checkFiles returns an error if the files on disk differ from the manifest.
func (w *Work) checkFiles(man *manifest) error {
	if err := w.checkMemory(man); err != nil {
		return err
	}
	return w.checkState(man)
}

// checkMemory checks the memory file. It must run before QEMU, which would extend a
// file that is too short.
func (w *Work) checkMemory(man *manifest) error {
	if man.Version != manifestVersion {
		return &instance.SnapshotError{Reason: fmt.Sprintf("it was saved in format %d, this version reads %d", man.Version, manifestVersion)}
	}
	if man.Full {
		return nil
	}
	st, err := os.Stat(w.r.memoryPath(w.id, w.rec))
	if err != nil {
		return &instance.SnapshotError{Reason: "its memory is missing: " + err.Error()}
	}
	if st.Size() != man.Memory {
		return &instance.SnapshotError{Reason: fmt.Sprintf("its memory has %d bytes, it was saved with %d", st.Size(), man.Memory)}
	}
	return nil
}

// checkState checks the state file.
func (w *Work) checkState(man *manifest) error {
	sum, n, err := digest(w.path(stateFile))
	if err != nil {
		return &instance.SnapshotError{Reason: "its state cannot be read: " + err.Error()}
	}
	if n != man.State {
		return &instance.SnapshotError{Reason: fmt.Sprintf("its state is damaged: it has %d bytes, and was saved with %d", n, man.State)}
	}
	if sum != man.Digest {
		return &instance.SnapshotError{Reason: "its state is damaged: the checksum does not match"}
	}
	return nil
}

// kernelSum caches the digest of the kernel's file until that file is replaced.
type kernelSum struct {
	mu  sync.Mutex
	st  os.FileInfo
	sum string
}

func (k *kernelSum) of(path string) (string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	st, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("cannot find the kernel: %w", err)
	}
	if k.st == nil || !os.SameFile(k.st, st) || k.st.Size() != st.Size() || !k.st.ModTime().Equal(st.ModTime()) {
		sum, _, err := digest(path)
		if err != nil {
			return "", err
		}
		k.st, k.sum = st, sum
	}
	return k.sum, nil
}

// digest returns a file's SHA-256 and size.
func digest(path string) (string, int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, f)
	if err != nil {
		return "", 0, fmt.Errorf("cannot read %s: %w", path, err)
	}
	return hex.EncodeToString(h.Sum(nil)), n, nil
}

// appear renames a complete file or directory to its final name. It syncs first, so
// that an incomplete one never has that name, even after a power failure.
func appear(tmp, path string) error {
	if err := syncPath(tmp); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return syncPath(filepath.Dir(path))
}

// syncPath makes a file or directory durable.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

func removeAll(paths ...string) error {
	var errs []error
	for _, p := range paths {
		if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/tartree"
)

// ReadFiles writes the file or tree at a path of an instance to w as a tar stream.
// The instance may be asleep; it is woken only if its runtime needs that to copy
// files. begun reports whether anything was written.
func (h *Host) ReadFiles(ctx context.Context, w io.Writer, ref, at string) (begun bool, err error) {
	if i, k, done, err := h.keeperOf(ctx, ref); err != nil || k != nil {
		if err != nil {
			return false, err
		}
		defer done()
		begun, err = k.ReadFiles(ctx, i.id, i.absolute(at), w)
		return begun, fileFault(i, at, err)
	}
	i, root, done, err := h.filesOf(ctx, ref)
	if err != nil {
		return false, err
	}
	defer done()
	at = i.absolute(at)
	begun, err = tartree.PackInside(w, root, at)
	return begun, fileFault(i, at, err)
}

// WriteFiles unpacks a tar stream at a path of an instance: into the directory at
// that path, or under that name in its parent. New files belong to the owner of the
// directory.
func (h *Host) WriteFiles(ctx context.Context, r io.Reader, ref, at string) error {
	if i, k, done, err := h.keeperOf(ctx, ref); err != nil || k != nil {
		if err != nil {
			return err
		}
		defer done()
		return fileFault(i, at, k.WriteFiles(ctx, i.id, i.absolute(at), r))
	}
	i, root, done, err := h.filesOf(ctx, ref)
	if err != nil {
		return err
	}
	defer done()
	at = i.absolute(at)
	return fileFault(i, at, tartree.UnpackInside(r, root, at))
}

// keeperOf returns the runtime of an instance if that copies files itself, and nil
// otherwise. If the runtime needs the instance awake, it is kept awake until done
// is called.
func (h *Host) keeperOf(ctx context.Context, ref string) (i *inst, k instance.FileKeeper, done func(), err error) {
	if i, err = h.find(ref); err != nil {
		return nil, nil, nil, err
	}
	k, ok := i.rt.(instance.FileKeeper)
	if !ok {
		return i, nil, nil, nil
	}
	if !k.FilesAwake() {
		return i, k, func() {}, nil
	}
	leave, err := h.hold(ctx, i, "lull cp")
	if err == nil {
		if err = h.Resume(ctx, ref, ByManual); err != nil {
			leave()
			if refused, ok := errors.AsType[*RefusedError](err); ok {
				refused.What = "copy files of"
			}
		}
	}
	return i, k, leave, err
}

// filesOf opens the root directory that the programs of an instance see. done
// closes it. A stopped instance cannot start before done is called.
func (h *Host) filesOf(ctx context.Context, ref string) (i *inst, root *os.File, done func(), err error) {
	if i, err = h.find(ref); err != nil {
		return nil, nil, nil, err
	}
	release := func() {}
	switch rt, rooted := i.rt.(instance.Rooted); {
	case rooted:
		root, err = rt.Root(i.id)
	case i.spec().Runtime == "process":
		root, err = os.OpenFile("/", unix.O_PATH|unix.O_DIRECTORY, 0)
	default:
		err = errors.New("runtime " + i.spec().Runtime + " cannot")
	}
	if rest, ok := i.rt.(instance.RestRooted); ok && err != nil {
		if aerr := i.acquireCtx(ctx); aerr != nil {
			return nil, nil, nil, aerr
		}
		release = i.release
		if i.state() == power.Stopped {
			root, err = rest.RestRoot(ctx, i.id, i.spec().Image)
		}
	}
	if err != nil {
		release()
		return nil, nil, nil, &RefusedError{Name: i.name(), What: "copy files of", Reason: err.Error()}
	}
	return i, root, func() { root.Close(); release() }, nil
}

// absolute returns at as an absolute path, relative to the instance's working
// directory.
func (i *inst) absolute(at string) string {
	if path.IsAbs(at) {
		return path.Clean(at)
	}
	return path.Join("/", i.spec().Workdir, at)
}

// fileFault converts an error about a path of an instance into one of the host.
func fileFault(i *inst, at string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, tartree.ErrNoPath):
		return &NotFoundError{Name: i.name(), File: at}
	case errors.Is(err, tartree.ErrIrregular):
		return &RefusedError{Name: i.name(), What: "copy " + at + " of", Reason: err.Error()}
	}
	return fmt.Errorf("copy %s of %s: %w", at, i.name(), err)
}

package microvm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"lull/internal/core/instance"
	"lull/internal/lib/tartree"
	"lull/internal/protocol/guest"
)

var _ instance.FileKeeper = (*Runtime)(nil)

// FilesAwake implements instance.FileKeeper. The guest copies its own files, so it
// must be awake.
func (r *Runtime) FilesAwake() bool { return true }

// ReadFiles implements instance.FileKeeper.
func (r *Runtime) ReadFiles(ctx context.Context, id, at string, w io.Writer) (begun bool, err error) {
	err = r.copyFiles(ctx, id, guest.ExecCall{Files: guest.FilesOut, At: at}, func(fail func(error)) instance.Streams {
		return instance.Streams{Out: writer(func(b []byte) (int, error) {
			begun = true
			n, err := w.Write(b)
			fail(err)
			return n, err
		})}
	})
	return begun, err
}

// WriteFiles implements instance.FileKeeper.
func (r *Runtime) WriteFiles(ctx context.Context, id, at string, from io.Reader) error {
	return r.copyFiles(ctx, id, guest.ExecCall{Files: guest.FilesIn, At: at}, func(fail func(error)) instance.Streams {
		return instance.Streams{Out: io.Discard, In: reader(func(b []byte) (int, error) {
			n, err := from.Read(b)
			if !errors.Is(err, io.EOF) {
				fail(err) // otherwise the guest would consider the stream complete
			}
			return n, err
		})}
	})
}

// copyFiles makes a guest copy files. The streams that streams returns may call
// fail; the copy then fails with the first such error.
func (r *Runtime) copyFiles(ctx context.Context, id string, c guest.ExecCall, streams func(fail func(error)) instance.Streams) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	s := streams(func(err error) {
		if err != nil {
			end(err)
		}
	})
	o, err := instance.Capture(func(own instance.Streams) (int, error) {
		s.Err = own.Err
		return r.exec(ctx, id, c, s)
	})
	if failed := context.Cause(ctx); failed != nil {
		return failed
	}
	switch {
	case err != nil:
		return err
	case o.ExitCode == guest.FilesNoPath:
		return tartree.ErrNoPath
	case o.ExitCode == guest.FilesIrregular:
		return tartree.ErrIrregular
	case o.ExitCode != 0:
		return errors.New(cmp.Or(strings.TrimSpace(o.Stderr), fmt.Sprintf("the copy in the guest ended with code %d", o.ExitCode)))
	}
	return nil
}

type (
	writer func([]byte) (int, error)
	reader func([]byte) (int, error)
)

func (f writer) Write(b []byte) (int, error) { return f(b) }
func (f reader) Read(b []byte) (int, error)  { return f(b) }

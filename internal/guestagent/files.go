package guestagent

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"lull/internal/lib/tartree"
	"lull/internal/protocol/guest"
)

// startCopy starts a process that copies files. It runs this same binary. As a
// process of its own, a copy that waits for a disk or the workspace can be killed
// like a command.
func (h *Harness) startCopy(c guest.ExecCall, stdio [3]*os.File) (*process, error) {
	return h.kids.start("/proc/self/exe", []string{"lull-harness", "files", c.Files, h.cfg.Root, c.At},
		&os.ProcAttr{Dir: "/", Files: stdio[:], Sys: &syscall.SysProcAttr{Setsid: true}})
}

// CopyFiles is the main function of the process that startCopy starts. args are the
// arguments from startCopy. It returns the exit code.
func CopyFiles(args []string, in io.Reader, out, errs io.Writer) int {
	err := copyFiles(args, in, out)
	switch {
	case err == nil:
		return 0
	case errors.Is(err, tartree.ErrNoPath):
		return guest.FilesNoPath
	case errors.Is(err, tartree.ErrIrregular):
		return guest.FilesIrregular
	}
	fmt.Fprintln(errs, err)
	return 1
}

func copyFiles(args []string, in io.Reader, out io.Writer) error {
	if len(args) != 3 {
		return errors.New("cannot use these arguments: want a direction, a root and a path")
	}
	root, err := os.OpenFile(args[1], unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return fmt.Errorf("cannot open the root: %w", err)
	}
	defer root.Close()
	switch args[0] {
	case guest.FilesIn:
		return tartree.UnpackInside(in, root, args[2])
	case guest.FilesOut:
		_, err := tartree.PackInside(out, root, args[2])
		return err
	}
	return fmt.Errorf("cannot copy files %.16q: want %s or %s", args[0], guest.FilesIn, guest.FilesOut)
}

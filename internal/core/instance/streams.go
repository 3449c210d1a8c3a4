package instance

import (
	"fmt"
	"io"
	"syscall"
)

// Streams connect a command to the caller that runs it.
type Streams struct {
	// In is the command's input; nil is empty. A read of In that has begun may
	// still be blocked when the command has ended.
	In io.Reader
	// Out and Err are each used by one goroutine, at the same time. A write that
	// blocks blocks the command. With TTY everything goes to Out.
	Out, Err io.Writer
	// TTY runs the command on its own terminal, with that size.
	TTY  bool
	Size Size
	// Control delivers resizes and signals while the command runs. It may be nil.
	Control <-chan Control
}

// Size is the size of a terminal, in characters.
type Size struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// Control is a new size of the terminal, or a signal for the command's process
// group.
type Control struct {
	Size   Size
	Signal syscall.Signal // 0 if this is a new size
}

// Exit codes of commands that could not be started, as in shells.
const (
	CannotRun = 126
	NotThere  = 127
)

// CommandError means that a command could not be started. Code is CannotRun or
// NotThere.
type CommandError struct {
	Code int
	Err  error
}

func (e *CommandError) Error() string { return e.Err.Error() }

func (e *CommandError) Unwrap() error { return e.Err }

// Capture calls run without input and returns its output, at most MaxOutput bytes
// of each stream.
func Capture(run func(Streams) (int, error)) (Outcome, error) {
	var out, errOut beginning
	code, err := run(Streams{Out: &out, Err: &errOut})
	if err != nil {
		return Outcome{}, err
	}
	return Outcome{ExitCode: code, Stdout: string(out.b), Stderr: string(errOut.b), Truncated: out.cut || errOut.cut}, nil
}

// beginning is a writer that keeps the first bytes.
type beginning struct {
	b   []byte
	cut bool // some bytes were dropped
}

func (k *beginning) Write(p []byte) (int, error) {
	part := p[:min(len(p), MaxOutput-len(k.b))]
	k.b, k.cut = append(k.b, part...), k.cut || len(part) < len(p)
	return len(p), nil
}

// ParseSignal returns the signal with number n. It returns an error if that may
// not be sent to a command.
func ParseSignal(n int) (syscall.Signal, error) {
	if n < 1 || n > 64 {
		return 0, fmt.Errorf("cannot use signal %d: want 1 to 64", n)
	}
	return syscall.Signal(n), nil
}

package instance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/spf13/cobra"
	xterm "golang.org/x/term"

	"lull/internal/cli/term"
	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
	"lull/internal/protocol/hostctl/execstream"
)

func (c verbs) execCommand() *cobra.Command {
	var r hostctl.ExecRequest
	var interactive, tty bool
	cmd := &cobra.Command{Use: "exec NAME COMMAND [ARG...]", Short: "Run a command in an instance's environment", Args: term.Args(cobra.MinimumNArgs(2)),
		ValidArgsFunction: c.CompleteInstances,
		Long: `Run a command in an instance's environment. A sleeping instance is woken first, and
is not paused while the command runs, except by a pause with --force.

With -i, standard input goes to the command; with -t, it runs on a terminal of its
own. -it is an interactive shell. The exit code is the command's, 127 if there is no
such command, and 126 if it cannot be run. Flags of lull come before NAME, or between
it and a --.

Ctrl-C and other signals go to the command, not to the instance. The third one ends
the command if it ignores the first two. The command also ends if its client or the
host daemon is killed, except in a Docker container, where it loses its input and
output. --json prints the result once the command has ended, with at most 8 MiB of
each stream.`,
		Example: "  lull exec web env\n  lull exec -it web sh\n  lull exec -i web tar x -C /tmp <files.tar",
		RunE: func(cmd *cobra.Command, a []string) error {
			if r.Command = a[1:]; strings.HasPrefix(a[1], "-") { // a[1:] may start with flags, up to a --
				n := slices.Index(r.Command, "--")
				if n < 0 {
					return term.Usage(fmt.Errorf("cannot use %q: give flags before the name, or a -- before the command", a[1]))
				}
				if err := cmd.ParseFlags(r.Command[:n]); err != nil {
					return term.FlagFault(cmd, err)
				}
				r.Command = r.Command[n+1:]
			}
			if len(r.Command) == 0 {
				return term.Usage(errors.New("missing a command: want lull exec NAME COMMAND [ARG...]"))
			}
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			if !c.JSON {
				return c.attach(cmd.Context(), cl, a[0], execstream.Request{Command: r, Input: interactive, TTY: tty})
			}
			if interactive || tty {
				return term.Usage(errors.New("cannot use --json with --interactive or --tty"))
			}
			x, err := cl.Exec(cmd.Context(), a[0], r)
			if err != nil && cmd.Context().Err() != nil {
				return c.interrupted()
			}
			if err != nil {
				return err
			}
			return c.Print(x, nil)
		}}
	cmd.Flags().SetInterspersed(false)
	cmd.Flags().BoolVarP(&interactive, "interactive", "i", false, "pass standard input on to the command")
	cmd.Flags().BoolVarP(&tty, "tty", "t", false, "run the command on a terminal")
	cmd.Flags().StringArrayVarP(&r.Env, "env", "e", nil, "KEY=VALUE; repeatable")
	cmd.Flags().StringVarP(&r.Dir, "workdir", "w", "", "working directory")
	return cmd
}

func (c verbs) interrupted() error {
	fmt.Fprintln(c.Err, "lull: interrupted; the command was ended")
	return term.Exit(128 + int(syscall.SIGINT))
}

// attach runs a command with its streams connected to those of this program.
func (c verbs) attach(ctx context.Context, cl *hostctl.Client, name string, q execstream.Request) error {
	in, _ := c.In.(*os.File)
	onTerminal := in != nil && term.IsTerminal(in)
	if q.TTY && q.Input && !onTerminal {
		return term.Usage(errors.New("cannot use --tty: standard input is not a terminal (leave out -t to pass it on as it is)"))
	}
	screen := in
	if out, ok := c.Out.(*os.File); ok && !onTerminal {
		screen = out
	}
	if q.TTY {
		q.Size = sizeOf(screen)
		if !slices.ContainsFunc(q.Env, func(e string) bool { return strings.HasPrefix(e, "TERM=") }) {
			q.Env = append(q.Env, "TERM="+cmp.Or(c.Getenv("TERM"), "xterm"))
		}
	}
	rw, err := cl.OpenExec(ctx, name, q)
	if err != nil {
		if ctx.Err() != nil {
			return c.interrupted()
		}
		return err
	}
	defer rw.Close()
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGWINCH)
	defer signal.Stop(signals)
	control, over := make(chan instance.Control), make(chan struct{})
	var left atomic.Bool
	leave := func() { left.Store(true); rw.Close() }
	go forward(signals, control, over, leave, q.TTY, screen)
	s := instance.Streams{Out: c.Out, Err: c.Err, Control: control}
	if q.Input {
		s.In = c.In
	}
	x, err := c.onRaw(in, q.TTY && q.Input, func() (execstream.Result, error) { return execstream.Run(rw, s) })
	close(over)
	switch {
	case left.Load():
		return c.interrupted()
	case err != nil:
		return err
	case x.Error != "":
		c.Complain(errors.New(x.Error))
		return term.Exit(cmp.Or(x.ExitCode, instance.CannotRun))
	case x.ExitCode != 0:
		return term.Exit(x.ExitCode)
	}
	return nil
}

// onRaw calls run. If raw is set, it puts the terminal in into raw mode meanwhile, so
// that every key is passed on.
func (c verbs) onRaw(in *os.File, raw bool, run func() (execstream.Result, error)) (execstream.Result, error) {
	if !raw {
		return run()
	}
	before, err := xterm.MakeRaw(int(in.Fd()))
	if err != nil {
		return execstream.Result{}, fmt.Errorf("set up the terminal: %w", err)
	}
	defer xterm.Restore(int(in.Fd()), before)
	return run()
}

// forward passes signals on to the command. It calls leave to close the connection at
// the third signal that asks the command to end. On a terminal, which passes on keys
// itself, it does so at the first.
func forward(signals <-chan os.Signal, control chan<- instance.Control, over <-chan struct{}, leave func(), tty bool, screen *os.File) {
	for ends := 0; ; {
		var m instance.Control
		select {
		case s := <-signals:
			m.Signal, _ = s.(syscall.Signal)
		case <-over:
			return
		}
		if m.Signal == syscall.SIGWINCH {
			if !tty {
				continue
			}
			m = instance.Control{Size: sizeOf(screen)}
		} else if ends++; tty || ends > 2 {
			leave()
			return
		}
		select {
		case control <- m:
		case <-over:
			return
		}
	}
}

// sizeOf returns the size of a terminal; zero if f is not a terminal.
func sizeOf(f *os.File) instance.Size {
	if f == nil {
		return instance.Size{}
	}
	cols, rows, err := xterm.GetSize(int(f.Fd()))
	if err != nil {
		return instance.Size{}
	}
	return instance.Size{Rows: uint16(rows), Cols: uint16(cols)}
}

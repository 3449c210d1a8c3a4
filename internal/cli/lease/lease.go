package lease

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/explain"
	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/protocol/guest"
	"lull/internal/protocol/hostctl"
)

func (c verbs) leaseCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "lease", Short: "Keep an instance awake while programs need it", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(c.leaseHold(), c.leaseRelease(), c.leaseList())
	return cmd
}

// leaser takes and releases leases of one instance: through the host's API, or from
// inside the instance through LULL_SOCKET.
type leaser interface {
	Hold(ctx context.Context, name string, r hostctl.LeaseRequest) ([]idle.Lease, error)
	Release(ctx context.Context, name, holder string) ([]idle.Lease, error)
}

// leaserOf returns the leaser for the instance called name. Inside an instance, no
// name or the instance's own name means that instance, through LULL_SOCKET. With
// --host, the host's API is used in any case.
func (c verbs) leaserOf(name string) (leaser, error) {
	if socket := c.Getenv("LULL_SOCKET"); socket != "" && c.Host == "" {
		if name == "" || name == c.Getenv("LULL_INSTANCE") || name == c.Getenv("LULL_INSTANCE_ID") {
			return insideLeases(socket), nil
		}
	}
	if name == "" {
		return nil, term.Usage(errors.New("missing NAME of the instance: only a program inside an instance, where LULL_SOCKET is set, can omit NAME"))
	}
	return c.HostClient()
}

// insideLeases is the path of LULL_SOCKET. The host identifies the calling instance
// through the kernel.
type insideLeases string

func (s insideLeases) Hold(ctx context.Context, _ string, r hostctl.LeaseRequest) ([]idle.Lease, error) {
	ttl := time.Duration(r.TTL)
	err := s.call(ctx, guest.Keepalive, map[string]any{"ttl_ms": ttl.Milliseconds(), "reason": r.Reason, "holder": r.Holder})
	if err != nil {
		return nil, fmt.Errorf("hold this instance: %w", err)
	}
	return []idle.Lease{{Holder: r.Holder, Reason: r.Reason, ExpiresAt: time.Now().Add(ttl)}}, nil
}

func (s insideLeases) Release(ctx context.Context, _, holder string) ([]idle.Lease, error) {
	if err := s.call(ctx, guest.KeepaliveRelease, map[string]any{"holder": holder}); err != nil {
		return nil, fmt.Errorf("release the lease on this instance: %w", err)
	}
	return nil, nil
}

// insideLimit is the time limit of a call. A host that restarts answers again within
// seconds.
const insideLimit = 35 * time.Second

func (s insideLeases) call(ctx context.Context, method string, params any) error {
	ctx, cancel := context.WithTimeout(ctx, insideLimit)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", string(s))
	if err != nil {
		return fmt.Errorf("LULL_SOCKET: %w", err)
	}
	defer conn.Close()
	p := guest.NewPeer(conn)
	go p.Run(nil, func(guest.Request) (any, error) { return nil, errors.New("cannot take calls") })
	return p.Call(ctx, method, params, nil)
}

func (c verbs) leaseHold() *cobra.Command {
	var holder, reason, until string
	var dur time.Duration
	cmd := &cobra.Command{
		Use:   "hold [NAME] [-- COMMAND [ARG...]]",
		Short: "Take or renew a lease",
		Long: `Take or renew a lease. While a lease is held, the instance is not paused. Each holder
has its own lease, with a reason and an expiry that why shows, and can release only
that one. A lease lasts 5 minutes unless --for or --until is given, at most a day.
With a command, the lease is renewed while the command runs and released when it
ends, and the exit code is the command's.

Inside an instance NAME can be omitted: the lease then holds that instance,
through LULL_SOCKET.`,
		Example: "  lull lease hold web --holder deploy --reason \"new version\" --for 10m\n  lull lease hold web --until 18:00\n  lull lease hold web --holder backup -- tar cf web.tar web\n  lull lease hold --holder agent --reason \"a task\"",
		Args:    term.Args(cobra.ArbitraryArgs), ValidArgsFunction: c.CompleteInstances,
		RunE: func(cmd *cobra.Command, a []string) error {
			name, command := "", a
			if len(a) > 0 && cmd.ArgsLenAtDash() != 0 {
				name, command = a[0], a[1:]
			}
			cl, err := c.leaserOf(name)
			if err != nil {
				return err
			}
			ttl, err := term.EndOr(time.Now(), until, dur, 5*time.Minute)
			if err != nil {
				return err
			}
			r := hostctl.LeaseRequest{Holder: holder, Reason: reason, TTL: idle.Duration(ttl)}
			if len(command) > 0 {
				if until != "" {
					return term.Usage(errors.New("cannot combine a command with --until: the lease lasts as long as the command runs"))
				}
				return c.holdWhile(cmd.Context(), cl, name, r, command)
			}
			l, err := cl.Hold(cmd.Context(), name, r)
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) { explain.Leases(w, l) })
		},
	}
	cmd.Flags().StringVar(&holder, "holder", "default", "holder of the lease")
	cmd.Flags().StringVar(&reason, "reason", "", "reason, shown by why")
	term.BindEnd(cmd.Flags(), &until, &dur)
	return cmd
}

// holdWhile runs a command while it holds a lease. It renews the lease after each
// third of its duration, and releases it when the command ends. It returns the
// command's exit code.
func (c verbs) holdWhile(ctx context.Context, cl leaser, name string, r hostctl.LeaseRequest, command []string) error {
	if _, err := cl.Hold(ctx, name, r); err != nil {
		return err
	}
	p := exec.Command(command[0], command[1:]...)
	p.Stdin, p.Stdout, p.Stderr = c.In, c.Out, c.Err
	sigs := make(chan os.Signal, 4)
	signal.Notify(sigs, os.Interrupt, syscall.SIGTERM) // the command gets these signals too; the lease is released when the command ends
	defer signal.Stop(sigs)
	if err := p.Start(); err != nil {
		return errors.Join(fmt.Errorf("cannot run %s: %w", command[0], err), c.drop(cl, name, r.Holder))
	}
	done := make(chan error, 1)
	go func() { done <- p.Wait() }()
	renew := time.NewTicker(max(time.Duration(r.TTL)/3, time.Second))
	defer renew.Stop()
	for {
		select {
		case s := <-sigs:
			if s == syscall.SIGTERM {
				p.Process.Signal(s)
			}
		case <-renew.C:
			rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			if _, err := cl.Hold(rctx, name, r); err != nil {
				fmt.Fprintln(c.Err, "lull: could not renew the lease:", err)
			}
			cancel()
		case err := <-done:
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				return errors.Join(err, c.drop(cl, name, r.Holder))
			}
			if derr := c.drop(cl, name, r.Holder); derr != nil {
				fmt.Fprintln(c.Err, "lull:", derr)
			}
			if exit != nil {
				return term.Exit(max(exit.ExitCode(), 1))
			}
			return nil
		}
	}
}

func (c verbs) drop(cl leaser, name, holder string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := cl.Release(ctx, name, holder)
	return err
}

func (c verbs) leaseRelease() *cobra.Command {
	var holder string
	cmd := &cobra.Command{Use: "release [NAME]", Short: "Release a lease", Example: "  lull lease release web", Args: term.Args(cobra.MaximumNArgs(1)), ValidArgsFunction: c.CompleteInstances,
		Long: `Release the lease of a holder. Inside an instance NAME can be omitted: the lease on
that instance is released, through LULL_SOCKET.`,
		RunE: func(cmd *cobra.Command, a []string) error {
			name := strings.Join(a, "")
			cl, err := c.leaserOf(name)
			if err != nil {
				return err
			}
			l, err := cl.Release(cmd.Context(), name, holder)
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) {
				if _, inside := cl.(insideLeases); inside {
					fmt.Fprintf(w, "%s holds no lease\n", holder)
					return
				}
				explain.Leases(w, l)
			})
		}}
	cmd.Flags().StringVar(&holder, "holder", "default", "whose")
	return cmd
}

func (c verbs) leaseList() *cobra.Command {
	return &cobra.Command{Use: "ls NAME", Short: "List leases of an instance", Example: "  lull lease ls web", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteInstances,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			o, err := cl.Get(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			return c.Print(o.Leases, func(w io.Writer) { explain.Leases(w, o.Leases) })
		}}
}

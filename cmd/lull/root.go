package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"github.com/spf13/cobra"

	"lull/internal/lib/httpx"
	"lull/internal/protocol/guest"
	"lull/internal/protocol/hostctl"
)

// version is set by the linker.
var version = "dev"

// Exit codes of every verb.
const (
	exitDone     = 0
	exitFailed   = 1
	exitUsage    = 2
	exitNotFound = 3
	exitRefused  = 4
)

// cli is the state shared by all verbs.
type cli struct {
	in     io.Reader
	out    io.Writer
	err    io.Writer
	getenv func(string) string
	json   bool
	output string
	host   string
	fleetFlags
}

// usageError is a mistake on the command line.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// exitError ends with a code of its own, and says nothing more.
type exitError struct{ code int }

func (e *exitError) Error() string { return fmt.Sprintf("exit code %d", e.code) }

// run is the whole program but for the process around it.
func run(ctx context.Context, args []string, in io.Reader, out, errw io.Writer, getenv func(string) string) int {
	c := &cli{in: in, out: out, err: errw, getenv: getenv}
	root := c.root()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitDone
	}
	var exit *exitError
	if errors.As(err, &exit) {
		return exit.code
	}
	c.complain(err)
	return exitCode(err)
}

func (c *cli) complain(err error) {
	fmt.Fprintln(c.err, "lull: "+strings.TrimSuffix(err.Error(), "\n"))
}

func exitCode(err error) int {
	if _, ok := errors.AsType[*usageError](err); ok || strings.HasPrefix(err.Error(), "unknown command") {
		return exitUsage
	}
	if p, ok := errors.AsType[*guest.Error](err); ok {
		switch p.Code {
		case guest.InvalidParams:
			return exitUsage
		case guest.Refused:
			return exitRefused
		}
	}
	if p, ok := errors.AsType[*httpx.Problem](err); ok {
		switch p.Status {
		case http.StatusNotFound:
			return exitNotFound
		case http.StatusConflict, http.StatusForbidden, http.StatusPreconditionFailed:
			return exitRefused
		case http.StatusUnprocessableEntity, http.StatusBadRequest, http.StatusRequestEntityTooLarge:
			return exitUsage
		}
	}
	return exitFailed
}

func (c *cli) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "lull",
		Short: "Pause idle compute and resume it on demand",
		Long: `lull finds idle compute, pauses it safely, and resumes it the moment it is needed.

To run instances on this machine, start lull host, then use lull run.`,
		SilenceErrors: true, SilenceUsage: true,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			switch c.output {
			case "", "text":
			case "json":
				c.json = true
			default:
				return &usageError{fmt.Errorf("cannot use --output %q: want text or json", c.output)}
			}
			return nil
		},
	}
	root.SetOut(c.out)
	root.SetErr(c.err)
	root.SetIn(c.in)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return &usageError{fmt.Errorf("%w; see: %s --help", err, cmd.CommandPath())}
	})
	f := root.PersistentFlags()
	f.BoolVar(&c.json, "json", false, "print the API's objects as JSON and nothing else")
	f.StringVarP(&c.output, "output", "o", "", "output format: text or json")
	c.fleetFlags.bind(f)
	f.StringVar(&c.host, "host", "", "socket of the host daemon, unix:///path (default $LULL_HOST, then the default socket)")
	host := c.hostCommand()
	host.AddCommand(c.hostLs(), c.hostGet(), c.hostWhy())
	root.AddCommand(host, c.runCommand(), c.psCommand(), c.restartCommand(), c.rmCommand(), c.instanceCommand(), c.imageCommand(), c.leaseCommand(), c.orServer(c.whyCommand(), c.workerWhy),
		c.orServer(c.eventsCommand(), c.fleetEvents), c.agentCommand(), c.snoozeCommand(), c.haltCommand(), c.configCommand(), c.doctorCommand(), c.guestKernelCommand(), c.versionCommand(), c.referenceCommand())
	root.AddCommand(c.serverCommand(), c.simCommand(), c.workerCommand(), c.templateCommand(), c.settingsCommand(), c.auditCommand(), c.tokenCommand(), c.loginCommand(), c.logoutCommand())
	root.AddCommand(c.policyCommand(), c.scheduleCommand(), c.overrideCommand(), c.budgetCommand())
	root.AddCommand(c.notifyCommand(), c.simulateCommand(), c.savingsCommand())
	for _, path := range toldUnderHalt {
		cmd, _, err := root.Find(strings.Fields(path))
		if err != nil || cmd.RunE == nil || cmd.CommandPath() != "lull "+path {
			panic("unknown command " + path) // of this program's own list
		}
		c.underHalt(cmd)
	}
	return root
}

// toldUnderHalt are the verbs that list or explain what a fleet is or does by
// itself: each says first that everything automatic is halted.
var toldUnderHalt = []string{
	"agent ls", "audit", "budget ls", "host get", "host ls", "host why", "notify dead", "notify ls", "override ls",
	"policy groups", "policy ls", "policy resolve", "savings", "schedule ls", "schedule next", "simulate",
	"template ls", "worker activity", "worker discovered", "worker get", "worker idle-status", "worker ls",
}

// args turns cobra's complaint about arguments into a usage error.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, a []string) error {
		if err := check(cmd, a); err != nil {
			if near := nearVerbs(cmd, a); near != "" {
				return &usageError{fmt.Errorf("%w; did you mean %s?", err, near)}
			}
			return &usageError{fmt.Errorf("%w; see: %s --help", err, cmd.CommandPath())}
		}
		return nil
	}
}

// nearVerbs are verbs of cmd that sound like what was given as one.
func nearVerbs(cmd *cobra.Command, a []string) string {
	if len(a) == 0 || !cmd.HasSubCommands() {
		return ""
	}
	cmd.SuggestionsMinimumDistance = max(cmd.SuggestionsMinimumDistance, 2) // cobra sets it for the root alone
	return strings.Join(cmd.SuggestionsFor(a[0]), " or ")
}

// client finds the host daemon.
func (c *cli) client() (*hostctl.Client, error) {
	return hostctl.NewClient(c.hostAddress())
}

// hostAddress is where the host is.
func (c *cli) hostAddress() string {
	return cmp.Or(c.host, c.getenv("LULL_HOST"), defaultSocket(c.getenv))
}

// defaultSocket is where a host of this user listens.
func defaultSocket(getenv func(string) string) string {
	if os.Geteuid() == 0 {
		return "/run/lull/host.sock"
	}
	if dir := getenv("XDG_RUNTIME_DIR"); dir != "" {
		return filepath.Join(dir, "lull", "host.sock")
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("lull-%d", os.Geteuid()), "host.sock")
}

// print shows v as JSON when asked to, or as text.
func (c *cli) print(v any, text func(w io.Writer)) error {
	if !c.json {
		text(c.out)
		return nil
	}
	if l := reflect.ValueOf(v); l.Kind() == reflect.Slice && l.IsNil() {
		v = []struct{}{} // a listing is an array, with nothing in it too
	}
	e := json.NewEncoder(c.out)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return fmt.Errorf("cannot print: %w", err)
	}
	return nil
}

// complete offers the names of instances.
func (c *cli) complete(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(a) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	cl, err := c.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	l, err := cl.List(cmd.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	names := make([]string, 0, len(l))
	for _, o := range l {
		names = append(names, o.Name+"\t"+o.State)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

func (c *cli) versionCommand() *cobra.Command {
	return &cobra.Command{Use: "version", Short: "Print the version", Args: args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			return c.print(map[string]string{"version": version}, func(w io.Writer) { fmt.Fprintln(w, "lull", version) })
		}}
}

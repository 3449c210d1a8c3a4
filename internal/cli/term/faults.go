package term

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lull/internal/core/policy/when"
	"lull/internal/lib/spell"
)

// FlagFault converts err, an error of pflag about a flag of cmd, to a usage error
// without Go terms.
func FlagFault(cmd *cobra.Command, err error) error {
	help := "; see: " + cmd.CommandPath() + " --help"
	var invalid *pflag.InvalidValueError
	var unknown *pflag.NotExistError
	var required *pflag.ValueRequiredError
	switch {
	case errors.As(err, &invalid):
		return Usage(fmt.Errorf("cannot use --%s %q: %s%s", invalid.GetFlag().Name, invalid.GetValue(), valueFault(invalid.GetFlag(), invalid.Unwrap()), help))
	case errors.As(err, &unknown):
		name := unknown.GetSpecifiedName()
		if near := nearFlags(cmd, name); near != "" {
			return Usage(fmt.Errorf("unknown flag %s: did you mean %s?", dashed(name), near))
		}
		return Usage(fmt.Errorf("unknown flag %s%s", dashed(name), help))
	case errors.As(err, &required):
		return Usage(fmt.Errorf("--%s needs a value%s", required.GetFlag().Name, help))
	}
	return Usage(fmt.Errorf("%w%s", err, help))
}

func dashed(name string) string {
	if len(name) == 1 {
		return "-" + name
	}
	return "--" + name
}

// valueFault returns the error for a value that cause rejected, with the values that
// the flag accepts.
func valueFault(f *pflag.Flag, cause error) string {
	if _, is := errors.AsType[*when.LengthError](cause); is {
		return "want a length such as " + when.LengthForms
	}
	if _, isNumber := errors.AsType[*strconv.NumError](cause); !isNumber {
		return cause.Error()
	}
	if errors.Is(cause, strconv.ErrRange) {
		return "out of range"
	}
	switch f.Value.Type() {
	case "bool":
		return "want true or false"
	case "float64":
		return "not a number"
	}
	return "not a whole number"
}

// nearFlags returns the flags of cmd that are spelled similarly to name.
func nearFlags(cmd *cobra.Command, name string) string {
	var near []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden && (isNear(name, f.Name) || len(name) > 2 && strings.HasPrefix(f.Name, name)) {
			near = append(near, "--"+f.Name)
		}
	})
	return strings.Join(near[:min(len(near), 3)], " or ")
}

// isNear reports whether typed may be a misspelling of name.
func isNear(typed, name string) bool {
	return spell.Distance(strings.ToLower(typed), name) <= min(2, max(len(typed)/3, 1))
}

// otherwise maps words that users know from other programs to the verbs that do the
// same here.
var otherwise = map[string]string{
	"list": "ps", "show": "inspect", "describe": "inspect", "kill": "stop", "delete": "rm", "remove": "rm", "attach": "logs -f", "create": "run", "unpause": "resume", "thaw": "resume",
	"freeze": "pause", "suspend": "pause", "wake": "start", "images": "image ls", "fleet": "worker", "log": "logs", "ssh": "exec", "shell": "exec", "fork": "instance clone", "update": "instance set",
	"prune": "image prune", "daemon": "host", "dashboard": "server", "signin": "login", "instances": "ps", "hosts": "host ls", "agents": "agent ls", "tokens": "token ls", "explain": "why",
}

// UnknownVerb returns the usage error for a word that is not a verb of cmd. It
// suggests similar verbs: first those of cmd and their aliases, then those of other
// commands.
func UnknownVerb(cmd *cobra.Command, word string) error {
	type candidate struct {
		path         string
		far, foreign int
	}
	var found []candidate
	root := cmd.Root()
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			if sub.Hidden {
				continue
			}
			far := -1
			for _, name := range append([]string{sub.Name()}, sub.Aliases...) {
				if d := spell.Distance(strings.ToLower(word), name); isNear(word, name) && (far < 0 || d < far) {
					far = d
				} else if far < 0 && len(word) > 2 && strings.HasPrefix(name, strings.ToLower(word)) {
					far = 2
				}
			}
			if far >= 0 {
				foreign := strings.Count(sub.CommandPath(), " ")
				if sub.Parent() == cmd {
					foreign = 0
				}
				found = append(found, candidate{sub.CommandPath(), far, foreign})
			}
			walk(sub)
		}
	}
	walk(root)
	if same := otherwise[strings.ToLower(word)]; same != "" && cmd == root {
		found = []candidate{{root.Name() + " " + same, 0, 0}}
	}
	slices.SortStableFunc(found, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.foreign, b.foreign), cmp.Compare(a.far, b.far), cmp.Compare(a.path, b.path))
	})
	var near []string
	for _, c := range found {
		if c.foreign > found[0].foreign && found[0].foreign == 0 {
			break
		}
		if !slices.Contains(near, c.path) && len(near) < 3 {
			near = append(near, c.path)
		}
	}
	if len(near) == 0 {
		return Usage(fmt.Errorf("%s has no command %q; see: %s --help", cmd.CommandPath(), word, cmd.CommandPath()))
	}
	return Usage(fmt.Errorf("%s has no command %q; did you mean: %s?", cmd.CommandPath(), word, strings.Join(near, ", ")))
}

// argFault returns the error for a wrong number of arguments of cmd.
func argFault(cmd *cobra.Command, a []string, cause error) error {
	switch {
	case cmd.HasSubCommands() && len(a) > 0:
		return UnknownVerb(cmd, a[0])
	case len(a) < leastArgs(cause):
		return Usage(fmt.Errorf("missing an argument: want %s; see: %s --help", usage(cmd), cmd.CommandPath()))
	case len(a) > 0:
		return Usage(fmt.Errorf("cannot use %q: want %s; see: %s --help", a[len(a)-1], usage(cmd), cmd.CommandPath()))
	}
	return Usage(fmt.Errorf("%w; see: %s --help", cause, cmd.CommandPath()))
}

// usage returns the command line of cmd with its arguments.
func usage(cmd *cobra.Command) string {
	_, args, _ := strings.Cut(cmd.Use, " ")
	return strings.TrimSpace(cmd.CommandPath() + " " + args)
}

// leastArgs returns the number of arguments that cobra requires: the first number in
// its error.
func leastArgs(err error) int {
	for _, w := range strings.Fields(err.Error()) {
		if n, err := strconv.Atoi(w); err == nil {
			return n
		}
	}
	return 0
}

package term

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lull/internal/core/idle"
	"lull/internal/core/policy/when"
)

// AcceptFormer makes f accept former names of flags, without showing them in help and
// completion. former maps them to the present names.
func AcceptFormer(f *pflag.FlagSet, former map[string]string) {
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(cmp.Or(former[name], name))
	})
}

// untilHelp is the help text of the flag --until.
const untilHelp = when.Forms

// LengthFlag is a flag whose value is a positive duration, in the syntax that all
// flags share.
type LengthFlag time.Duration

// Set reads the flag.
func (l *LengthFlag) Set(text string) error {
	d, err := when.Length(text)
	if err == nil {
		*l = LengthFlag(d)
	}
	return err
}

// String returns the value in the form that Set accepts.
func (l *LengthFlag) String() string {
	if *l == 0 {
		return ""
	}
	return typed(time.Duration(*l))
}

// Type names the value in help texts.
func (l *LengthFlag) Type() string { return "length" }

// spanFlag is a flag whose value is a duration or 0 for none.
type spanFlag time.Duration

// Set reads the flag.
func (s *spanFlag) Set(text string) error {
	d, err := when.Span(text)
	if err == nil {
		*s = spanFlag(d)
	}
	return err
}

// String returns the value in the form that Set accepts.
func (s *spanFlag) String() string { return typed(time.Duration(*s)) }

// typed formats a duration exactly, in the form that a user would type.
func typed(d time.Duration) string {
	short := idle.Human(d)
	if read, err := when.Span(short); err != nil || read != d {
		return d.String()
	}
	return short
}

// Type names the value in help texts.
func (s *spanFlag) Type() string { return "length" }

// BindSpan defines a flag for a duration that may be 0. usual is the default.
func BindSpan(f *pflag.FlagSet, to *time.Duration, name string, usual time.Duration, doc string) {
	*to = usual
	f.Var((*spanFlag)(to), name, doc)
	if usual == 0 {
		f.Lookup(name).DefValue = "0" // so that help texts do not show a default
	}
}

// WholeMinutes parses a duration of whole minutes. A bare number is in minutes.
func WholeMinutes(text string) (int, error) {
	if n, err := strconv.Atoi(text); err == nil {
		return n, nil
	}
	d, err := when.Span(text)
	if err != nil {
		return 0, err
	}
	if d%time.Minute != 0 {
		return 0, fmt.Errorf("cannot use %s: want whole minutes", text)
	}
	return int(d / time.Minute), nil
}

// NumberFlag is a flag for a duration that is a number of minutes in the API. A
// negative number may have a special meaning there.
type NumberFlag int

// Set reads the flag.
func (n *NumberFlag) Set(text string) error {
	m, err := WholeMinutes(text)
	if err == nil {
		*n = NumberFlag(m)
	}
	return err
}

// String returns the value in the form that Set accepts.
func (n *NumberFlag) String() string {
	if *n <= 0 {
		return strconv.Itoa(int(*n))
	}
	return strconv.Itoa(int(*n)) + "m"
}

// Type names the value in help texts.
func (n *NumberFlag) Type() string { return "length" }

// BindEnd defines the flags --until and --for.
func BindEnd(f *pflag.FlagSet, until *string, dur *time.Duration) {
	f.StringVar(until, "until", "", untilHelp)
	f.Var((*LengthFlag)(dur), "for", "how long from now: "+when.LengthForms)
}

// EndFlags are the flags --until and --for of a verb that --off reverses.
type EndFlags struct {
	Off   bool
	until string
	Dur   time.Duration
}

// Bind defines the flags --until, --for and --off. off is the help text of --off.
func (e *EndFlags) Bind(f *pflag.FlagSet, off string) {
	BindEnd(f, &e.until, &e.Dur)
	f.BoolVar(&e.Off, "off", false, off)
}

// Take reads the duration in the second argument of a verb, if there is one. It means
// the same as --for.
func (e *EndFlags) Take(a []string) (err error) {
	if len(a) < 2 {
		return nil
	}
	if e.Off || e.until != "" || e.Dur != 0 {
		return Usage(fmt.Errorf("cannot combine %q with --for, --until or --off", a[1]))
	}
	if e.Dur, err = when.Length(a[1]); err != nil {
		return Usage(err)
	}
	return nil
}

// End returns the requested end; the zero time for --off.
func (e *EndFlags) End(now time.Time) (t time.Time, err error) {
	switch {
	case !e.Off:
		t, err = End(now, e.until, e.Dur)
	case e.until != "" || e.Dur != 0:
		err = errors.New("cannot combine --off with an end")
	}
	if err != nil {
		return t, Usage(err)
	}
	return t, nil
}

// End returns the end that is given as a time or as a duration. Giving both is an
// error.
func End(now time.Time, until string, dur time.Duration) (time.Time, error) {
	length := ""
	if dur != 0 {
		length = dur.String()
	}
	return when.End(now, until, length)
}

// EndOr returns the duration from now to the end given by until or dur; usual if
// neither is given.
func EndOr(now time.Time, until string, dur, usual time.Duration) (time.Duration, error) {
	if until == "" && dur == 0 {
		return usual, nil
	}
	end, err := End(now, until, dur)
	if err != nil {
		return 0, Usage(err)
	}
	return end.Sub(now), nil
}

// Past parses a time that must be before now; empty means the zero time.
func Past(now time.Time, s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	return when.Past(now, s)
}

// Minutes converts a number of minutes in the API to a duration; m must not be nil.
func Minutes(m *int) time.Duration { return time.Duration(*m) * time.Minute }

// minutesFlag is a flag for a duration that is in minutes in the API.
type minutesFlag struct{ at **int }

// Set reads the flag.
func (m minutesFlag) Set(text string) error {
	d, err := when.Span(text)
	if err != nil {
		return err
	}
	if d%time.Minute != 0 {
		return fmt.Errorf("cannot use %s: want whole minutes", text)
	}
	n := int(d / time.Minute)
	*m.at = &n
	return nil
}

// String returns "", because the flag has no default.
func (m minutesFlag) String() string { return "" }

// Type names the value in help texts.
func (m minutesFlag) Type() string { return "length" }

// CompleteWords makes a flag of cmd complete fixed words. The flag must exist.
func CompleteWords(cmd *cobra.Command, flag string, words ...string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)) // cannot fail: the flag exists
}

// ParseSize parses a number of bytes with an optional K, M or G.
func ParseSize(s string) (int64, error) {
	if s == "" {
		return 0, nil
	}
	num, unit := s, int64(1)
	for suffix, u := range map[string]int64{"K": 1 << 10, "M": 1 << 20, "G": 1 << 30} {
		if n, ok := strings.CutSuffix(strings.ToUpper(s), suffix); ok {
			num, unit = n, u
		}
	}
	var n int64
	if _, err := fmt.Sscanf(num, "%d", &n); err != nil || n <= 0 || n > 1<<20 || fmt.Sprint(n) != num {
		return 0, fmt.Errorf("%q is not a size like 10M", s)
	}
	return n * unit, nil
}

// MinutesInto returns the value of a flag that sets *to to a length in minutes.
// The flag has no default.
func MinutesInto(to **int) pflag.Value { return minutesFlag{to} }

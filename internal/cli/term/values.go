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

// AcceptFormer makes f accept former names of its flags, which help and
// completion do not show. former maps them to the present names.
func AcceptFormer(f *pflag.FlagSet, former map[string]string) {
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(cmp.Or(former[name], name))
	})
}

// untilHelp is the help text of every --until.
const untilHelp = when.Forms

// LengthFlag is a length on the command line, in the one grammar for times.
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

// spanFlag is a length on the command line that may be none, with a default.
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

// typed formats a duration as a user would type it, to the nanosecond.
func typed(d time.Duration) string {
	short := idle.Human(d)
	if read, err := when.Span(short); err != nil || read != d {
		return d.String()
	}
	return short
}

// Type names the value in help texts.
func (s *spanFlag) Type() string { return "length" }

// BindSpan gives a verb a length that may be none.
func BindSpan(f *pflag.FlagSet, to *time.Duration, name string, usual time.Duration, doc string) {
	*to = usual
	f.Var((*spanFlag)(to), name, doc)
	if usual == 0 {
		f.Lookup(name).DefValue = "0" // which a help text does not name
	}
}

// WholeMinutes reads a length of whole minutes; a bare number is minutes.
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

// NumberFlag is a length in minutes on the command line that is a number in the
// API, in which a number below 0 may mean something of its own.
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

// BindEnd gives a verb --until and --for.
func BindEnd(f *pflag.FlagSet, until *string, dur *time.Duration) {
	f.StringVar(until, "until", "", untilHelp)
	f.Var((*LengthFlag)(dur), "for", "how long from now: "+when.LengthForms)
}

// EndFlags are --until and --for of a verb that takes back with --off what it
// did.
type EndFlags struct {
	Off   bool
	until string
	Dur   time.Duration
}

// Bind adds --until, --for and --off to f; off is the help of --off.
func (e *EndFlags) Bind(f *pflag.FlagSet, off string) {
	BindEnd(f, &e.until, &e.Dur)
	f.BoolVar(&e.Off, "off", false, off)
}

// Take reads the length that a verb has after its first argument, if it is there,
// like --for.
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

// End is the moment that was given; the zero time for --off.
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

// End reads an end that is given as a time or a length, not both.
func End(now time.Time, until string, dur time.Duration) (time.Time, error) {
	length := ""
	if dur != 0 {
		length = dur.String()
	}
	return when.End(now, until, length)
}

// EndOr returns the length from now until the end given by until or dur; usual
// if neither is given.
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

// Past reads a time that lies behind now; empty is the zero time.
func Past(now time.Time, s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	return when.Past(now, s)
}

// Minutes returns a number of minutes of the API; m must not be nil.
func Minutes(m *int) time.Duration { return time.Duration(*m) * time.Minute }

// minutesFlag is a length on the command line that the API has in minutes.
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

// String is empty: nothing is the default.
func (m minutesFlag) String() string { return "" }

// Type names the value in help texts.
func (m minutesFlag) Type() string { return "length" }

// CompleteWords completes a flag of cmd with fixed words. The flag must exist.
func CompleteWords(cmd *cobra.Command, flag string, words ...string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)) // as above
}

// ParseSize reads bytes with an optional K, M or G.
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

package main

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/pflag"

	"lull/internal/core/idle"
	"lull/internal/core/policy/when"
)

// untilHelp is the help text of every --until.
const untilHelp = when.Forms

// lengthFlag is a length on the command line, in the one grammar for times.
type lengthFlag time.Duration

// Set reads the flag.
func (l *lengthFlag) Set(text string) error {
	d, err := when.Length(text)
	if err == nil {
		*l = lengthFlag(d)
	}
	return err
}

// String is the flag as it is read.
func (l *lengthFlag) String() string {
	if *l == 0 {
		return ""
	}
	return typed(time.Duration(*l))
}

// Type names the value in help texts.
func (l *lengthFlag) Type() string { return "length" }

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

// String is the flag as it is read.
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

// bindSpan gives a verb a length that may be none.
func bindSpan(f *pflag.FlagSet, to *time.Duration, name string, usual time.Duration, doc string) {
	*to = usual
	f.Var((*spanFlag)(to), name, doc)
	if usual == 0 {
		f.Lookup(name).DefValue = "0" // which a help text does not name
	}
}

// wholeMinutes reads a length of whole minutes; a bare number is minutes.
func wholeMinutes(text string) (int, error) {
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

// numberFlag is a length in minutes on the command line that is a number in the
// API, in which a number below 0 may mean something of its own.
type numberFlag int

// Set reads the flag.
func (n *numberFlag) Set(text string) error {
	m, err := wholeMinutes(text)
	if err == nil {
		*n = numberFlag(m)
	}
	return err
}

// String is the flag as it is read.
func (n *numberFlag) String() string {
	if *n <= 0 {
		return strconv.Itoa(int(*n))
	}
	return strconv.Itoa(int(*n)) + "m"
}

// Type names the value in help texts.
func (n *numberFlag) Type() string { return "length" }

// bindEnd gives a verb --until and --for.
func bindEnd(f *pflag.FlagSet, until *string, dur *time.Duration) {
	f.StringVar(until, "until", "", untilHelp)
	f.Var((*lengthFlag)(dur), "for", "how long from now: "+when.LengthForms)
}

// endFlags are --until and --for of a verb that takes back with --off what it
// did.
type endFlags struct {
	off   bool
	until string
	dur   time.Duration
}

func (e *endFlags) bind(f *pflag.FlagSet, off string) {
	bindEnd(f, &e.until, &e.dur)
	f.BoolVar(&e.off, "off", false, off)
}

// end is the moment that was given; the zero time for --off.
func (e *endFlags) end(now time.Time) (t time.Time, err error) {
	switch {
	case !e.off:
		t, err = moment(now, e.until, e.dur)
	case e.until != "" || e.dur != 0:
		err = errors.New("cannot combine --off with an end")
	}
	if err != nil {
		return t, &usageError{err}
	}
	return t, nil
}

// moment reads an end that is given as a time or a length, not both.
func moment(now time.Time, until string, dur time.Duration) (time.Time, error) {
	length := ""
	if dur != 0 {
		length = dur.String()
	}
	return when.End(now, until, length)
}

// endOr is moment as a length from now; usual where neither is given.
func endOr(now time.Time, until string, dur, usual time.Duration) (time.Duration, error) {
	if until == "" && dur == 0 {
		return usual, nil
	}
	end, err := moment(now, until, dur)
	if err != nil {
		return 0, &usageError{err}
	}
	return end.Sub(now), nil
}

// pastMoment reads a time that lies behind now; empty is the zero time.
func pastMoment(now time.Time, s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	return when.Past(now, s)
}

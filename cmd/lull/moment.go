package main

import (
	"time"

	"github.com/spf13/pflag"

	"lull/internal/policy/when"
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
	return time.Duration(*l).String()
}

// Type names the value in help texts.
func (l *lengthFlag) Type() string { return "length" }

// bindEnd gives a verb --until and --for.
func bindEnd(f *pflag.FlagSet, until *string, dur *time.Duration) {
	f.StringVar(until, "until", "", untilHelp)
	f.Var((*lengthFlag)(dur), "for", "how long from now: 90m, 2h, 1d")
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

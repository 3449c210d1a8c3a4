package term

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// Finding is the result of one check of a doctor.
type Finding struct {
	What  string `json:"what"`
	OK    bool   `json:"ok"`
	Found string `json:"found"`
	Do    string `json:"do,omitempty"` // what the user can do about it
	// Optional means that the finding matters only for a runtime other than process.
	Optional bool `json:"optional,omitempty"`
}

// Findings are the results of a doctor so far.
type Findings []Finding

// Add appends a finding. do is the advice to the user, and is kept only if ok is false.
func (l *Findings) Add(what string, ok bool, found, do string) {
	if ok {
		do = ""
	}
	*l = append(*l, Finding{What: what, OK: ok, Found: found, Do: do})
}

// Optional appends a finding that matters only for one runtime. If err is not nil,
// err is the finding, and do is the advice to the user.
func (l *Findings) Optional(what string, err error, found, do string) {
	f := Finding{What: what, OK: err == nil, Found: found, Optional: true}
	if err != nil {
		f.Found, f.Do = err.Error(), do
	}
	*l = append(*l, f)
}

// Hint adds advice to the last finding even though it is no fault.
func (l Findings) Hint(do string) { l[len(l)-1].Do = do }

// ShowFindings prints the findings of a doctor. If something required is missing, it
// returns an error that prints nothing more.
func (c *Term) ShowFindings(l Findings) error {
	err := c.Print(l, func(w io.Writer) { findingsText(w, l) })
	if err == nil && slices.ContainsFunc(l, func(f Finding) bool { return !f.OK && !f.Optional }) {
		err = Exit(ExitFailed)
	}
	return err
}

// minFound is the width below which the result of a check is printed below its title.
const minFound = 40

func findingsText(w io.Writer, l Findings) {
	what := 0
	for _, f := range l {
		what = max(what, len(f.What))
	}
	for _, f := range l {
		mark := "ok"
		switch {
		case !f.OK && f.Optional:
			mark = "not present"
		case !f.OK:
			mark = "MISSING"
		}
		first, below := fmt.Sprintf("%-11s  %-*s  ", mark, what, f.What), strings.Repeat(" ", 13)
		if room := Width(w); room > 0 && room < len(first)+minFound {
			fmt.Fprintf(w, "%-11s  %s\n", mark, f.What)
			first = below
		} else {
			below = strings.Repeat(" ", len(first))
		}
		Wrapped(w, first, f.Found)
		if f.Do != "" {
			Wrapped(w, below+"-> ", f.Do)
		}
	}
}

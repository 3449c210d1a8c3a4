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
	Do    string `json:"do,omitempty"` // what to do about it
	// Optional means that only one runtime besides process needs it.
	Optional bool `json:"optional,omitempty"`
}

// Findings are the results of a doctor so far.
type Findings []Finding

// Add keeps what was found, and what to do where that is not well.
func (l *Findings) Add(what string, ok bool, found, do string) {
	if ok {
		do = ""
	}
	*l = append(*l, Finding{What: what, OK: ok, Found: found, Do: do})
}

// Optional keeps what only one runtime needs, and what to do where err says that
// it is not here.
func (l *Findings) Optional(what string, err error, found, do string) {
	f := Finding{What: what, OK: err == nil, Found: found, Optional: true}
	if err != nil {
		f.Found, f.Do = err.Error(), do
	}
	*l = append(*l, f)
}

// Hint adds advice to the last finding, although it is no fault.
func (l Findings) Hint(do string) { l[len(l)-1].Do = do }

// ShowFindings prints what a doctor found. It fails without a word more where
// something that is needed is missing.
func (c *Term) ShowFindings(l Findings) error {
	err := c.Print(l, func(w io.Writer) { findingsText(w, l) })
	if err == nil && slices.ContainsFunc(l, func(f Finding) bool { return !f.OK && !f.Optional }) {
		err = Exit(ExitFailed)
	}
	return err
}

// minFound is the width below which what was found is printed below its title.
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

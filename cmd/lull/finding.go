package main

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// finding is one thing that lull doctor looked at.
type finding struct {
	What  string `json:"what"`
	OK    bool   `json:"ok"`
	Found string `json:"found"`
	Do    string `json:"do,omitempty"` // what to do about it
	// Optional is what only one runtime beside process needs.
	Optional bool `json:"optional,omitempty"`
}

func findingsText(w io.Writer, l []finding) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, f := range l {
		mark := "ok"
		if !f.OK {
			mark = "MISSING"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", mark, f.What, f.Found)
		if f.Do != "" {
			fmt.Fprintf(t, "\t\t-> %s\n", f.Do)
		}
	}
	t.Flush()
}

// Package term has what all verbs share: their streams; how they print objects,
// tables, times and sizes; how their flags parse times and durations; and the exit
// codes for errors.
//
// Results go to Out, diagnostics to Err. With JSON set, a verb prints the objects of
// the API and nothing else. A verb never exits by itself: it returns an error, and
// ExitCode returns the exit code for it.
package term

import (
	"fmt"
	"io"

	"github.com/spf13/pflag"
)

// Term is where a verb reads and prints, and in which format. JSON is set for every
// machine-readable format. Getenv reads the environment; verbs must not read that of
// the process.
type Term struct {
	In     io.Reader
	Out    io.Writer
	Err    io.Writer
	Getenv func(string) string
	JSON   bool

	output string
	width  int // width of tables; 0 means unlimited
}

// Bind defines the flags that select the output format. CheckOutput reads them.
func (c *Term) Bind(f *pflag.FlagSet) {
	f.BoolVar(&c.JSON, "json", false, "print the API's objects as JSON and nothing else")
	f.StringVarP(&c.output, "output", "o", "", "output format: text, wide (every column), name, json or yaml")
}

// CheckOutput reads the flags of Bind and measures the terminal. It sets JSON for
// every format other than text. It returns a usage error for an unknown format.
func (c *Term) CheckOutput() error {
	switch c.output {
	case "", "text":
		c.width = c.screen()
	case "wide":
	case "json", "yaml", "name":
		c.JSON = true
	default:
		return Usage(fmt.Errorf("cannot use --output %q: want text, wide, name, json or yaml", c.output))
	}
	return nil
}

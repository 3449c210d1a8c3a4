// Package term has what all verbs share: the streams they use, how they print
// objects, tables, times and sizes, how their flags read times and lengths, and
// the exit code that belongs to an error.
//
// Results go to Out, diagnostics to Err. With JSON set, a verb prints the
// objects of the API and nothing else. A verb never exits by itself: it returns
// an error, and ExitCode says what the process returns for it.
package term

import (
	"fmt"
	"io"

	"github.com/spf13/pflag"
)

// Term is where a verb reads and prints, and in which form. JSON is set for every
// form that programs read. Getenv reads the environment; no verb reads that of the
// process.
type Term struct {
	In     io.Reader
	Out    io.Writer
	Err    io.Writer
	Getenv func(string) string
	JSON   bool

	output string
	width  int // of tables; 0 is unlimited
}

// Bind adds the flags that choose the output format. CheckOutput reads them.
func (c *Term) Bind(f *pflag.FlagSet) {
	f.BoolVar(&c.JSON, "json", false, "print the API's objects as JSON and nothing else")
	f.StringVarP(&c.output, "output", "o", "", "output format: text, wide (every column), name, json or yaml")
}

// CheckOutput reads the flags of Bind: it sets JSON for every format that is not
// text, and measures the terminal. It returns a usage error for an unknown format.
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

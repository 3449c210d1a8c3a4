package agent

import (
	"fmt"
	"strings"

	"lull/internal/protocol/tags"
)

// Example returns a local file with every setting and its default, commented
// out.
func Example() string {
	var b strings.Builder
	b.WriteString("# lull agent. Settings here override the instance's tags of the same names.\n# replace-tags: true      # do not read tags at all\n# allow-tag-hooks: true   # run pre-stop commands that tags name: who can write tags then owns the machine\n")
	base := Defaults()
	for _, f := range tags.Fields() {
		v, ok := base.Get(f.Name)
		if !ok {
			v = ""
		}
		if strings.ContainsAny(v, ":, ") {
			v = fmt.Sprintf("%q", v)
		}
		fmt.Fprintf(&b, "\n# %s (%s)\n# %s: %s\n", f.Doc, f.Form, f.Name, v)
	}
	return b.String()
}

package term

import (
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Layout of help texts, in columns.
const (
	helpWidth = 80 // where the terminal's is not known
	nameRoom  = 34 // a wider column of flag names gets lines of its own
	underName = 8
)

func init() {
	cobra.AddTemplateFunc("flagUsages", flagUsages)
	cobra.AddTemplateFunc("fold", fold)
	cobra.AddTemplateFunc("continued", continued)
}

// WrapHelp makes the help of cmd and its subcommands fit the terminal.
func (c *Term) WrapHelp(cmd *cobra.Command) {
	width := c.screen()
	if width < helpWidth/2 {
		width = helpWidth
	}
	usage := cmd.UsageTemplate()
	for _, set := range []string{"LocalFlags", "InheritedFlags"} {
		usage = strings.ReplaceAll(usage, "."+set+".FlagUsages", fmt.Sprintf("flagUsages .%s %d", set, width))
	}
	cmd.SetUsageTemplate(strings.ReplaceAll(usage, "{{.Example}}", fmt.Sprintf("{{continued .Example %d}}", width)))
	cmd.SetHelpTemplate(strings.Replace(cmd.HelpTemplate(), "{{. | trimTrailingWhitespaces}}", fmt.Sprintf("{{fold . %d | trimTrailingWhitespaces}}", width), 1))
}

// usageLine is a line of pflag: the flag and what it does.
var usageLine = regexp.MustCompile(`^( +(?:-\S, )?--\S+(?: \S+)?) {3,}(.*)$`)

// flagUsages describes flags in lines of at most width columns.
func flagUsages(f *pflag.FlagSet, width int) string {
	var b strings.Builder
	lines := strings.Split(strings.TrimRight(f.FlagUsages(), "\n"), "\n")
	column := 0
	for _, l := range lines {
		if m := usageLine.FindStringSubmatch(l); m != nil {
			column = max(column, utf8.RuneCountInString(m[1])+3)
		}
	}
	for _, l := range lines {
		m := usageLine.FindStringSubmatch(l)
		switch {
		case m == nil:
			b.WriteString(l + "\n")
		case column > nameRoom:
			b.WriteString(m[1] + "\n" + folded(strings.Repeat(" ", underName), m[2], width))
		default:
			b.WriteString(folded(fmt.Sprintf("%-*s", column, m[1]), m[2], width))
		}
	}
	return b.String()
}

// folded is first with text behind it, in lines of at most width columns. Further
// lines begin below text.
func folded(first, text string, width int) string {
	var b strings.Builder
	indent := utf8.RuneCountInString(first)
	line, used := first, indent
	flush := func() {
		b.WriteString(line + "\n")
		line, used = strings.Repeat(" ", indent), indent
	}
	for word := range strings.FieldsSeq(text) {
		if used > indent && used+1+utf8.RuneCountInString(word) > width {
			flush()
		} else if used > indent {
			line, used = line+" ", used+1
		}
		for used+utf8.RuneCountInString(word) > width { // a list of words
			cut := strings.LastIndexAny(word[:min(len(word), max(width-used, 1))], ",|/") + 1
			if cut == 0 {
				break
			}
			line += word[:cut]
			flush()
			word = word[cut:]
		}
		line, used = line+word, used+utf8.RuneCountInString(word)
	}
	flush()
	return b.String()
}

// continued breaks shell commands of more than width columns at blanks outside of
// quotes, so that they can still be copied.
func continued(text string, width int) string {
	var out []string
	for l := range strings.SplitSeq(text, "\n") {
		for utf8.RuneCountInString(l) > width {
			cut, quote := 0, rune(0)
			for n, r := range l[:width-2] {
				switch {
				case quote == 0 && (r == '\'' || r == '"'):
					quote = r
				case r == quote:
					quote = 0
				case r == ' ' && quote == 0 && strings.TrimSpace(l[:n]) != "":
					cut = n
				}
			}
			if cut == 0 {
				break
			}
			out = append(out, l[:cut]+" \\")
			l = "      " + l[cut+1:]
		}
		out = append(out, l)
	}
	return strings.Join(out, "\n")
}

// fold breaks the paragraphs of a text into lines of at most width columns. Lines
// that begin with a blank or a sign stay as they are.
func fold(text string, width int) string {
	var b, paragraph strings.Builder
	end := func() {
		if paragraph.Len() > 0 {
			b.WriteString(folded("", paragraph.String(), width))
			paragraph.Reset()
		}
	}
	for l := range strings.SplitSeq(text, "\n") {
		if l == "" || strings.ContainsAny(l[:1], " \t*#|") || strings.HasPrefix(l, "- ") {
			end()
			b.WriteString(l + "\n")
			continue
		}
		paragraph.WriteString(l + " ")
	}
	end()
	return b.String()
}

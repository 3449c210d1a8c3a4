package term

import (
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// Layout of help texts, in columns.
const (
	helpWidth = 80 // used if the width of the terminal is unknown
	nameRoom  = 34 // if a flag's name is wider, its description starts on the next line
	underName = 8
)

// WrapHelp makes the help of cmd and its subcommands fit the terminal, by wrapping
// what cobra prints. A template of our own would link text/template, and with it
// every method of every type.
func (c *Term) WrapHelp(cmd *cobra.Command) {
	width := c.screen()
	if width < helpWidth/2 {
		width = helpWidth
	}
	help, usage := cmd.HelpFunc(), cmd.UsageFunc()
	cmd.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		text := captured(cmd, func() { help(cmd, args) })
		what, how, found := strings.Cut(text, "\n"+usageTitle+"\n")
		fmt.Fprint(cmd.OutOrStdout(), strings.TrimRight(fold(what, width), "\n"), "\n")
		if found {
			fmt.Fprint(cmd.OutOrStdout(), "\n"+usageTitle+"\n", how)
		}
	})
	cmd.SetUsageFunc(func(cmd *cobra.Command) (err error) {
		text := captured(cmd, func() { err = usage(cmd) })
		fmt.Fprint(cmd.OutOrStderr(), wrapUsage(text, width))
		return err
	})
}

const usageTitle = "Usage:"

// captured calls do and returns what it prints to cmd.
func captured(cmd *cobra.Command, do func()) string {
	var b strings.Builder
	out, err := cmd.OutOrStdout(), cmd.ErrOrStderr()
	cmd.SetOut(&b)
	cmd.SetErr(&b)
	do()
	cmd.SetOut(out)
	cmd.SetErr(err)
	return b.String()
}

// wrapUsage wraps the flags and examples of a usage text. Each paragraph starts with
// its title.
func wrapUsage(text string, width int) string {
	paragraphs := strings.Split(text, "\n\n")
	for i, p := range paragraphs {
		title, body, _ := strings.Cut(strings.TrimLeft(p, "\n"), "\n")
		switch title {
		case "Flags:", "Global Flags:":
			p = title + "\n" + strings.TrimRight(flagUsages(body, width), "\n")
		case "Examples:":
			p = title + "\n" + continued(body, width)
		default:
			continue
		}
		paragraphs[i] = p
	}
	return strings.TrimRight(strings.Join(paragraphs, "\n\n"), "\n") + "\n"
}

// usageLine matches a flag and its description in pflag's output.
var usageLine = regexp.MustCompile(`^( +(?:-\S, )?--\S+(?: \S+)?) {3,}(.*)$`)

// flagUsages formats pflag's description of flags in lines of at most width columns.
func flagUsages(text string, width int) string {
	var b strings.Builder
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
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

// folded returns first followed by text, in lines of at most width columns. Further
// lines are indented to the beginning of text.
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
		for used+utf8.RuneCountInString(word) > width { // for a long list of words
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

// continued breaks shell commands that are wider than width at blanks outside quotes,
// with a backslash, so that they can still be copied.
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

// fold wraps the paragraphs of a text at width columns. Lines that start with a blank
// or a punctuation mark stay unchanged.
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

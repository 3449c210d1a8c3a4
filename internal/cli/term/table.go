package term

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"golang.org/x/term"
)

// gap is the number of blanks between two columns.
const gap = 2

// minColumn is the width below which a column is not shortened further.
const minColumn = 8

// Table returns a writer that aligns columns separated by tabs. Its Flush prints
// the table to w.
func Table(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 0, gap, ' ', 0) }

// Rows prints rows under a header. Cells are separated by tabs. A column whose title
// starts with a digit and a colon may be left out if the table is wider than the
// terminal; 1 is left out first. If that is not enough, the widest cells are
// shortened.
func Rows(w io.Writer, header string, each func(row func(format string, a ...any))) {
	titles := strings.Split(header, "\t")
	priority := make([]int, len(titles))
	for i, t := range titles {
		if rank, title, ok := strings.Cut(t, ":"); ok {
			if n, err := strconv.Atoi(rank); err == nil {
				priority[i], titles[i] = n, title
			}
		}
	}
	rows := [][]string{titles}
	each(func(format string, a ...any) {
		cells := strings.Split(fmt.Sprintf(format, a...), "\t")
		for len(cells) < len(titles) {
			cells = append(cells, "")
		}
		rows = append(rows, cells)
	})
	if room := Width(w); room > 0 {
		rows = fit(rows, priority, room)
	}
	t := Table(w)
	for _, cells := range rows {
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	t.Flush()
}

// fit makes rows at most room characters wide. It leaves out columns by priority, and
// then shortens the widest column step by step.
func fit(rows [][]string, priority []int, room int) [][]string {
	widths := make([]int, len(priority))
	for _, cells := range rows {
		for i := range widths {
			widths[i] = max(widths[i], utf8.RuneCountInString(cells[i]))
		}
	}
	keep := make([]bool, len(priority))
	for i := range keep {
		keep[i] = true
	}
	total := func() (n int) {
		for i, k := range keep {
			if k {
				n += widths[i] + gap
			}
		}
		return n - gap
	}
	for total() > room {
		next := -1
		for i, p := range priority {
			if keep[i] && p > 0 && (next < 0 || p < priority[next]) {
				next = i
			}
		}
		if next < 0 {
			break
		}
		keep[next] = false
	}
	for total() > room {
		widest := -1
		for i, k := range keep {
			if k && (widest < 0 || widths[i] > widths[widest]) {
				widest = i
			}
		}
		if widest < 0 || widths[widest] <= minColumn {
			break
		}
		widths[widest]--
	}
	out := make([][]string, len(rows))
	for n, cells := range rows {
		for i, k := range keep {
			if k {
				out[n] = append(out[n], Shorten(cells[i], widths[i]))
			}
		}
	}
	return out
}

// Shorten returns s shortened to at most n characters, with an ellipsis in place of
// the rest.
func Shorten(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// narrow is a writer with a limited width.
type narrow struct {
	io.Writer
	width int
}

// Width returns the width for tables on w, a writer that Print passes to its text; 0
// means unlimited.
func Width(w io.Writer) int {
	if n, ok := w.(narrow); ok {
		return n.width
	}
	return 0
}

// Wrapped prints first followed by text, with line breaks between words where the
// line would be wider than w, a writer from Print. Further lines are indented to the
// beginning of text.
func Wrapped(w io.Writer, first, text string) {
	indent, room := utf8.RuneCountInString(first), Width(w)
	line, width := first, indent
	for n, word := range strings.Split(text, " ") {
		switch l := utf8.RuneCountInString(word); {
		case n == 0:
			line, width = line+word, width+l
		case room > 0 && width+1+l > room && width > indent:
			fmt.Fprintln(w, line)
			line, width = strings.Repeat(" ", indent)+word, indent+l
		default:
			line, width = line+" "+word, width+1+l
		}
	}
	fmt.Fprintln(w, line)
}

// screen returns the width of Out if it is a terminal, or COLUMNS; 0 for a file or
// pipe.
func (c *Term) screen() int {
	if n, err := strconv.Atoi(c.Getenv("COLUMNS")); err == nil && n > 0 {
		return n
	}
	if f, ok := c.Out.(interface{ Fd() uintptr }); ok {
		if n, _, err := term.GetSize(int(f.Fd())); err == nil {
			return n
		}
	}
	return 0
}

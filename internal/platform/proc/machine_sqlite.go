package proc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"
)

// The login records of a Debian 13 machine (wtmpdb and lastlog2) are SQLite
// files. This reader supports the needed part of the format
// (sqlite.org/fileformat2.html): table b-trees with interior pages, leaf pages
// and records. It does not support indexes, text encodings other than UTF-8, the
// write-ahead log, and the overflow pages of a record. A file that cannot be read
// this way is an error, never empty.

const sqliteMax = 256 << 20 // bytes of a login database

var errSQLite = errors.New("not a readable SQLite file")

// sqliteFile reads pages of a database.
type sqliteFile struct {
	r     io.ReaderAt
	page  int
	usage int   // usable bytes of a page
	pages int64 // pages in the file
	left  int   // pages that may still be read; ends a cycle in a damaged file
}

// openSQLite checks the header of the database in r, which has size bytes.
func openSQLite(r io.ReaderAt, size int64) (*sqliteFile, error) {
	var h [100]byte
	if size > sqliteMax {
		return nil, fmt.Errorf("cannot read a login database of %d bytes: %w", size, errTooLarge)
	}
	if _, err := r.ReadAt(h[:], 0); err != nil {
		return nil, fmt.Errorf("%w: header: %w", errSQLite, err)
	}
	if string(h[:16]) != "SQLite format 3\x00" {
		return nil, fmt.Errorf("%w: wrong magic", errSQLite)
	}
	s := &sqliteFile{r: r, page: int(binary.BigEndian.Uint16(h[16:]))}
	if s.page == 1 {
		s.page = 65536
	}
	if s.page < 512 || s.page&(s.page-1) != 0 {
		return nil, fmt.Errorf("%w: page size %d", errSQLite, s.page)
	}
	if h[18] > 1 || h[19] > 1 {
		return nil, fmt.Errorf("%w: it uses a write-ahead log", errSQLite)
	}
	s.usage = s.page - int(h[20])
	s.pages = size / int64(s.page)
	s.left = 2*int(s.pages) + 2 // the schema and one table, each page once
	if s.usage < 480 {
		return nil, fmt.Errorf("%w: page size %d", errSQLite, s.usage)
	}
	return s, nil
}

// cell is one value of a record: an integer, or text.
type cell struct {
	n    int64
	text string
	null bool
}

// root returns the first page of the table's b-tree.
func (s *sqliteFile) root(table string) (int64, error) {
	var root int64
	err := s.walk(1, false, 0, func(_ int64, row []cell) bool {
		if len(row) >= 4 && row[0].text == "table" && row[1].text == table {
			root = row[3].n
		}
		return root == 0
	})
	if err == nil && root == 0 {
		err = fmt.Errorf("%w: no table %q", errSQLite, table)
	}
	return root, err
}

// walk calls each for the rows of the b-tree at page, until each returns false.
// The order is oldest first, or newest first if backwards is set.
func (s *sqliteFile) walk(page int64, backwards bool, depth int, each func(id int64, row []cell) bool) error {
	_, err := s.visit(page, backwards, depth, each)
	return err
}

func (s *sqliteFile) visit(page int64, backwards bool, depth int, each func(int64, []cell) bool) (more bool, err error) {
	if page < 1 || page > s.pages || depth > 20 || s.left == 0 {
		return false, fmt.Errorf("%w: page %d of %d", errSQLite, page, s.pages)
	}
	s.left--
	b := make([]byte, s.page)
	if _, err := s.r.ReadAt(b, (page-1)*int64(s.page)); err != nil {
		return false, fmt.Errorf("%w: page %d: %w", errSQLite, page, err)
	}
	b = b[:s.usage]
	head := 0
	if page == 1 {
		head = 100
	}
	kind, cells := b[head], int(binary.BigEndian.Uint16(b[head+3:]))
	size := 8
	if kind == 5 {
		size = 12
	} else if kind != 13 {
		return false, fmt.Errorf("%w: page %d is not a table page", errSQLite, page)
	}
	if head+size+2*cells > len(b) {
		return false, fmt.Errorf("%w: page %d has %d cells", errSQLite, page, cells)
	}
	n := cells
	if kind == 5 {
		n++ // the right-most child
	}
	for i := range n {
		if backwards {
			i = n - 1 - i
		}
		if kind == 5 && i == cells {
			more, err = s.visit(int64(binary.BigEndian.Uint32(b[head+8:])), backwards, depth+1, each)
		} else {
			at := int(binary.BigEndian.Uint16(b[head+size+2*i:]))
			if at+4 > len(b) {
				return false, fmt.Errorf("%w: page %d, cell %d", errSQLite, page, i)
			}
			if kind == 5 {
				more, err = s.visit(int64(binary.BigEndian.Uint32(b[at:])), backwards, depth+1, each)
			} else {
				more, err = leaf(b[at:], s.usage, each)
			}
		}
		if err != nil || !more {
			return false, err
		}
	}
	return true, nil
}

// leaf decodes one cell of a leaf page.
func leaf(b []byte, usage int, each func(int64, []cell) bool) (bool, error) {
	size, b, ok := varint(b)
	id, b, ok2 := varint(b)
	if !ok || !ok2 || size < 0 {
		return false, fmt.Errorf("%w: torn cell", errSQLite)
	}
	// Only the beginning of a record that does not fit is on this page.
	if most := int64(usage - 35); size > most {
		least := int64((usage-12)*32/255 - 23)
		kept := least + (size-least)%int64(usage-4)
		if kept > most {
			kept = least
		}
		size = kept
	}
	if size > int64(len(b)) {
		return false, fmt.Errorf("%w: torn record", errSQLite)
	}
	row, ok := record(b[:size])
	if !ok {
		return false, fmt.Errorf("%w: torn record %d", errSQLite, id)
	}
	return each(id, row), nil
}

// record decodes the columns that are completely in b. ok is false if b is not a
// record.
func record(b []byte) (row []cell, ok bool) {
	whole := b
	head, b, ok := varint(b)
	if !ok || head > int64(len(whole)) || head < int64(len(whole)-len(b)) {
		return nil, false
	}
	types, body := whole[len(whole)-len(b):head], whole[head:]
	for len(types) > 0 {
		var t int64
		if t, types, ok = varint(types); !ok || t < 0 {
			return nil, false
		}
		size := [...]int64{0, 1, 2, 3, 4, 6, 8, 8, 0, 0}
		var n int64
		switch {
		case t < 10:
			n = size[t]
		case t >= 12:
			n = (t - 12) / 2
		default:
			return nil, false
		}
		if n > int64(len(body)) {
			return row, true // the rest is on an overflow page
		}
		v := body[:n]
		body = body[n:]
		switch {
		case t == 0:
			row = append(row, cell{null: true})
		case t <= 6:
			row = append(row, cell{n: sqliteInt(v)})
		case t == 9:
			row = append(row, cell{n: 1})
		case t >= 13 && t%2 == 1:
			row = append(row, cell{text: string(v)})
		default:
			row = append(row, cell{})
		}
	}
	return row, true
}

func sqliteInt(b []byte) int64 {
	var n int64
	if len(b) > 0 && b[0]&0x80 != 0 {
		n = -1
	}
	for _, c := range b {
		n = n<<8 | int64(c)
	}
	return n
}

// varint decodes SQLite's variable-length integer: big endian, 7 bits per byte,
// all 8 bits of the ninth byte.
func varint(b []byte) (v int64, rest []byte, ok bool) {
	for i := 0; i < len(b) && i < 9; i++ {
		if i == 8 {
			return v<<8 | int64(b[i]), b[i+1:], true
		}
		v = v<<7 | int64(b[i]&0x7f)
		if b[i] < 0x80 {
			return v, b[i+1:], true
		}
	}
	return 0, nil, false
}

// logins is the content of a login database.
type logins struct {
	newest time.Time
	who    string
}

// parseWtmpdb reads the newest login among the last 1000 rows of a wtmpdb
// database (table wtmp: ID, Type, User, Login and Logout in microseconds, TTY,
// RemoteHost, Service).
func parseWtmpdb(r io.ReaderAt, size int64) (logins, error) {
	const userProcess = 3 // in wtmpdb's own numbering
	return newestRow(r, size, "wtmp", true, func(row []cell) (time.Time, string, bool) {
		if len(row) < 4 || row[1].n != userProcess {
			return time.Time{}, "", false
		}
		who := row[2].text
		if len(row) > 5 && row[5].text != "" {
			who += " on " + row[5].text
		}
		return microTime(row[3].n), who, true
	})
}

// parseLastlog2 reads the newest login from a lastlog2 database (table
// Lastlog2: Name, Time in seconds, ...).
func parseLastlog2(r io.ReaderAt, size int64) (logins, error) {
	return newestRow(r, size, "Lastlog2", false, func(row []cell) (time.Time, string, bool) {
		if len(row) < 2 || row[1].n <= 0 || row[1].n >= maxUnix {
			return time.Time{}, "", false
		}
		return time.Unix(row[1].n, 0), row[0].text, true
	})
}

func microTime(us int64) time.Time {
	if us <= 0 || us/1e6 >= maxUnix {
		return time.Time{}
	}
	return time.UnixMicro(us)
}

func newestRow(r io.ReaderAt, size int64, table string, newestFirst bool, read func([]cell) (time.Time, string, bool)) (logins, error) {
	var l logins
	s, err := openSQLite(r, size)
	if err != nil {
		return l, err
	}
	root, err := s.root(table)
	if err != nil {
		return l, err
	}
	rows := 0
	err = s.walk(root, newestFirst, 0, func(_ int64, row []cell) bool {
		if at, who, ok := read(row); ok && at.After(l.newest) {
			l.newest, l.who = at, who
		}
		rows++
		return !newestFirst || rows < 1000
	})
	return l, err
}

// readLoginDB reads a login database that another program may be writing. It
// returns an error if a journal file exists beside it, because the pages may then
// be incomplete.
func readLoginDB(path string, parse func(io.ReaderAt, int64) (logins, error)) (logins, error) {
	f, err := openPlain(path)
	if err != nil {
		return logins{}, err
	}
	defer f.Close()
	if st, err := os.Stat(path + "-journal"); err == nil && st.Size() > 0 {
		return logins{}, fmt.Errorf("cannot read %s: it is being written", path)
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return logins{}, err
	}
	st, err := f.Stat()
	if err != nil {
		return logins{}, err
	}
	l, err := parse(f, st.Size())
	if err != nil {
		return l, fmt.Errorf("cannot read %s: %w", path, err)
	}
	return l, nil
}

package proc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// UtmpLayout is the format of a record of utmp and wtmp, which depends on the
// machine. With glibc, most 64-bit machines keep 32-bit times there; arm64 and
// riscv64 keep 64-bit times.
type UtmpLayout struct {
	size, sec int
	wide      bool // 64-bit times
}

// The two layouts in use.
var (
	UtmpNarrow = UtmpLayout{size: 384, sec: 340}
	UtmpWide   = UtmpLayout{size: 400, sec: 344, wide: true}
)

// NativeUtmp returns the layout of this machine.
func NativeUtmp() UtmpLayout {
	switch runtime.GOARCH {
	case "arm64", "riscv64", "loong64":
		return UtmpWide
	}
	return UtmpNarrow
}

// utmpUser is the type of a record of a user's login (USER_PROCESS).
const utmpUser = 7

// utmpRecord is one record of utmp or wtmp.
type utmpRecord struct {
	kind int16
	pid  int32
	line string
	user string
	host string
	at   time.Time
}

// parseUtmp parses complete records. It omits an incomplete last record,
// because the file may be appended to while it is read.
func parseUtmp(b []byte, l UtmpLayout) []utmpRecord {
	var out []utmpRecord
	for ; len(b) >= l.size; b = b[l.size:] {
		r := utmpRecord{
			kind: int16(binary.LittleEndian.Uint16(b)),
			pid:  int32(binary.LittleEndian.Uint32(b[4:])),
			line: cString(b[8:40]),
			user: cString(b[44:76]),
			host: cString(b[76:332]),
		}
		var sec int64
		if l.wide {
			sec = int64(binary.LittleEndian.Uint64(b[l.sec:]))
		} else {
			sec = int64(binary.LittleEndian.Uint32(b[l.sec:])) // unsigned: valid until 2106
		}
		if sec > 0 && sec < maxUnix {
			r.at = time.Unix(sec, 0)
		}
		out = append(out, r)
	}
	return out
}

// maxUnix is the end of the year 9999. A later time is damaged data, and RFC 3339
// could not represent it.
const maxUnix = 253402300800

func cString(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// tailMax is how many bytes at the end of wtmp are read: about 2,700 records.
const tailMax = 1 << 20

// readTail returns the last complete records of the file at path.
func readTail(path string, record int) ([]byte, error) {
	f, err := openPlain(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	size := st.Size() - st.Size()%int64(record)
	from := int64(0)
	if size > tailMax {
		from = size - tailMax/int64(record)*int64(record)
	}
	b := make([]byte, size-from)
	n, err := f.ReadAt(b, from)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return b[:n], nil
}

// openPlain opens a regular file. It fails for files of other kinds, without
// blocking.
func openPlain(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = &fs.PathError{Op: "read", Path: path, Err: errors.New("not a regular file")}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// newestLogin returns the time and user of the newest login among records; zero
// for none.
func newestLogin(records []utmpRecord) (at time.Time, who string) {
	for i := range records {
		r := &records[i]
		if r.kind == utmpUser && r.user != "" && r.at.After(at) {
			at, who = r.at, r.user
			if r.line != "" {
				who += " on " + r.line
			}
		}
	}
	return at, who
}

// parseLastlog returns the newest time among lastlog records. A record has 292
// bytes, or 296 with 64-bit times; its index is the user's number.
func parseLastlog(b []byte, l UtmpLayout) time.Time {
	size := 292
	if l.wide {
		size = 296
	}
	var newest int64
	for ; len(b) >= size; b = b[size:] {
		sec := int64(binary.LittleEndian.Uint32(b))
		if l.wide {
			sec = int64(binary.LittleEndian.Uint64(b))
		}
		if sec > newest && sec < maxUnix {
			newest = sec
		}
	}
	return unixTime(newest)
}

// readLastlog returns the newest time in the lastlog file. It reads only the
// parts that contain data, at most 4 MiB: the file is as long as the highest user
// number requires and consists almost entirely of a hole.
func readLastlog(path string, l UtmpLayout) (time.Time, error) {
	f, err := openPlain(path)
	if err != nil {
		return time.Time{}, err
	}
	defer f.Close()
	record := int64(292)
	if l.wide {
		record = 296
	}
	var newest time.Time
	read := int64(0)
	for at := int64(0); ; {
		data, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if err == unix.ENXIO {
			return newest, nil
		}
		if err != nil {
			return newest, &fs.PathError{Op: "seek", Path: path, Err: err}
		}
		data -= data % record
		hole, err := unix.Seek(int(f.Fd()), data+record, unix.SEEK_HOLE)
		if err != nil {
			if err == unix.ENXIO {
				return newest, nil
			}
			return newest, &fs.PathError{Op: "seek", Path: path, Err: err}
		}
		end := hole + (record-(hole-data)%record)%record
		if read += end - data; read > machineFileMax {
			return newest, fmt.Errorf("cannot read %s: %w of data", path, errTooLarge)
		}
		b := make([]byte, end-data)
		n, err := f.ReadAt(b, data)
		if err != nil && !errors.Is(err, io.EOF) {
			return newest, err
		}
		if t := parseLastlog(b[:n], l); t.After(newest) {
			newest = t
		}
		if n == 0 {
			return newest, nil
		}
		at = end
	}
}

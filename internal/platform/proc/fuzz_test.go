package proc

import (
	"bytes"
	"os"
	"slices"
	"strconv"
	"testing"
)

func FuzzParseStat(f *testing.F) {
	if b, err := os.ReadFile("/proc/self/stat"); err == nil {
		f.Add(b)
	}
	f.Add([]byte(statLine(3, 1)))
	f.Add([]byte("1 (a) b) Z 0 0 0 0 -1 0 0 0 0 0 -5 0 0 0 20 0 1 0 9 0 0"))
	f.Add([]byte("1 ()"))
	f.Fuzz(func(t *testing.T, b []byte) {
		st, err := parseStat(b)
		if err == nil && !bytes.HasPrefix(bytes.TrimLeft(b, "0"), []byte(strconv.Itoa(st.PID))) && st.PID != 0 {
			t.Errorf("parseStat(%q) has pid %d", b, st.PID)
		}
	})
}

func FuzzParsePending(f *testing.F) {
	if b, err := os.ReadFile("/proc/self/status"); err == nil {
		f.Add(b)
	}
	f.Add([]byte("SigPnd:\t0000000000004000\nShdPnd:\t0000000000000001\n"))
	f.Add([]byte("SigPnd:\t-1\nShdPnd:"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if set, err := parsePending(b); err != nil && set != 0 {
			t.Errorf("parsePending(%q) = %x, %v", b, set, err)
		}
	})
}

func FuzzParseChildren(f *testing.F) {
	f.Add([]byte("1 2 3 "))
	f.Add([]byte("4294967296"))
	f.Add([]byte("-1 x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		pids, err := parseChildren(nil, b)
		if err == nil && slices.ContainsFunc(pids, func(n int) bool { return n <= 0 }) {
			t.Errorf("parseChildren(%q) = %v", b, pids)
		}
	})
}

func FuzzParseSocketLink(f *testing.F) {
	f.Add([]byte("socket:[123]"))
	f.Add([]byte("socket:[]"))
	f.Add([]byte("pipe:[1]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		inode, ok := parseSocketLink(b)
		if ok && !bytes.HasSuffix(b, []byte(strconv.FormatUint(inode, 10)+"]")) {
			t.Errorf("parseSocketLink(%q) = %d", b, inode)
		}
	})
}

func FuzzParseBootID(f *testing.F) {
	f.Add([]byte("0af5cf2b-5f0c-4a39-b5d1-1d9a1c0e7f6d\n"))
	f.Add([]byte("-af5cf2b-5f0c-4a39-b5d1-1d9a1c0e7f6d"))
	f.Fuzz(func(t *testing.T, b []byte) {
		id, err := parseBootID(b)
		if err == nil && len(id) != 36 {
			t.Errorf("parseBootID(%q) = %q", b, id)
		}
	})
}

func FuzzHasEntry(f *testing.F) {
	f.Add([]byte("A=1\x00B=2\x00"), "B=2")
	f.Add([]byte("A=1\x00B=2"), "B=")
	f.Fuzz(func(t *testing.T, b []byte, mark string) {
		want := mark != "" && slices.ContainsFunc(bytes.Split(b, []byte{0}), func(e []byte) bool { return string(e) == mark })
		if got := hasEntry(b, mark); got != want {
			t.Errorf("hasEntry(%q, %q) = %v", b, mark, got)
		}
	})
}

func FuzzDirents(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 24, 0, 4, '4', '2', 0, 0, 0})
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, '4', '2', 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		eachNumber(b, func(n int) bool {
			if n < 0 {
				t.Errorf("a negative name %d", n)
			}
			return true
		})
	})
}

package segment

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"lull/internal/lib/errtest"
)

func TestSealed(t *testing.T) {
	path := filepath.Join(fresh(t), "record")
	if _, err := ReadSealed(path, 100); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), path) {
		t.Errorf("a missing file: %v", err)
	}
	for _, payload := range []string{"", "one\n", "two\nlull-record 1\n"} {
		errtest.None(t, WriteSealed(path, []byte(payload), 0o600))
		got, err := ReadSealed(path, int64(len(payload)))
		if err != nil || string(got) != payload {
			t.Errorf("%q gave %q, %v", payload, got, err)
		}
	}
	if info, _ := os.Stat(path); info.Mode() != 0o600 {
		t.Error(info.Mode())
	}
	for _, limit := range []int64{0, 1, 17} {
		if _, err := ReadSealed(path, limit); err == nil || !strings.Contains(err.Error(), fmt.Sprint(limit)) {
			t.Errorf("limit %d: %v", limit, err)
		}
	}
}

// TestSealedAtEachByte cuts a sealed file, and changes it, at each byte. Each
// time the error must name the file and say what to do.
func TestSealedAtEachByte(t *testing.T) {
	whole := Seal([]byte(`{"id":"web","state":"paused"}`))
	check := func(what string, pos int, data []byte) {
		_, err := Unseal("/data/web", data)
		fault, ok := errors.AsType[*SealError](err)
		if !ok || fault.Name != "/data/web" {
			t.Errorf("%s at %d: %v", what, pos, err)
		}
	}
	for pos := range whole {
		check("cut", pos, whole[:pos])
		bad := append([]byte(nil), whole...)
		bad[pos] ^= 0x20
		check("flipped", pos, bad)
	}
	check("longer", len(whole), append(whole, 'x'))
}

func TestSealFaults(t *testing.T) {
	sum := strings.Repeat("0", 64)
	for data, want := range map[string]string{
		"":                            "it is empty",
		"{}\n":                        "does not begin with",
		"lull-re":                     "does not begin with",
		"lull-record 1 sha256=" + sum: "cut off in its first line",
		"lull-record 2 sha256=" + sum + " len=0\n":      `its version is "2"`,
		"lull-record 1 sha256=" + sum + " len=-1\n":     "first line is damaged",
		"lull-record 1 sha256=" + sum + " len=07\n":     "first line is damaged",
		"lull-record 1 sha256=12 len=0\n":               "first line is damaged",
		"lull-record 1\n":                               "first line is damaged",
		"lull-record 1 sha256=" + sum + " len=2\na":     "truncated: 1 of 2 bytes",
		"lull-record 1 sha256=" + sum + " len=2\nabc":   "1 bytes follow its end",
		"lull-record 1 sha256=" + sum + " len=2\nab":    "checksum is wrong",
		"lull-record 1 " + strings.Repeat("x", 1<<20):   "does not begin with",
		"lull-record " + strings.Repeat("x", 20) + "\n": "its version is",
	} {
		if _, err := Unseal("r", []byte(data)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60q: %v, want %s", data, err, want)
		}
	}
}

func TestWriteFile(t *testing.T) {
	dir := fresh(t)
	path := filepath.Join(dir, "f")
	for _, text := range []string{"first", "second"} {
		errtest.None(t, WriteFile(path, []byte(text), 0o640))
		if got, err := os.ReadFile(path); err != nil || string(got) != text {
			t.Errorf("%q, %v", got, err)
		}
	}
	if err := WriteFile(filepath.Join(dir, "none", "f"), nil, 0o600); !errors.Is(err, fs.ErrNotExist) || !strings.HasPrefix(err.Error(), "cannot write") {
		t.Error(err)
	}
	errtest.None(t, os.Mkdir(filepath.Join(dir, "d"), 0o700))
	if err := WriteFile(filepath.Join(dir, "d"), []byte("x"), 0o600); err == nil {
		t.Error("a folder was replaced")
	}
	os.WriteFile(filepath.Join(dir, temporary+"123"), []byte("left by a crash"), 0o600)
	if n, err := RemoveTemporary(dir); n != 1 || err != nil {
		t.Errorf("removed %d, %v", n, err)
	}
	entries, _ := os.ReadDir(dir)
	if len(entries) != 2 {
		t.Errorf("left: %v", entries)
	}
}

func FuzzUnseal(f *testing.F) {
	f.Add([]byte("lull-record 1 sha256= len=1\nx"))
	f.Add(Seal([]byte("payload")))
	f.Add(Seal(nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		payload, err := Unseal("f", data)
		if err == nil && string(Seal(payload)) != string(data) {
			t.Errorf("%q was accepted as %q", data, payload)
		}
	})
}

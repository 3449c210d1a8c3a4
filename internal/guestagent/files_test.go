package guestagent

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/guest"
)

// TestMain also runs the process that copies files.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "files" {
		os.Exit(CopyFiles(os.Args[2:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// archive returns a tar stream with one file.
func archive(t *testing.T, name, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o640, Size: int64(len(content))})
	if err == nil {
		_, err = io.WriteString(w, content)
	}
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestCopyFiles checks that copies resolve links inside the root, the exit codes of
// copies, and the owners of copied files.
func TestCopyFiles(t *testing.T) {
	root, outside := t.TempDir(), t.TempDir()
	for _, err := range []error{
		os.Mkdir(filepath.Join(root, "srv"), 0o755),
		os.WriteFile(filepath.Join(outside, "secret"), nil, 0o644),
		os.Symlink("/srv", filepath.Join(root, "inner")),
		os.Symlink(outside, filepath.Join(root, "outer")),
		os.Symlink("../../../..", filepath.Join(root, "srv/top")),
		syscall.Mkfifo(filepath.Join(root, "fifo"), 0o644),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if os.Geteuid() == 0 {
		errtest.None(t, os.Chown(filepath.Join(root, "srv"), 1234, 2345))
	}
	for _, c := range []struct {
		way, at string
		code    int
		made    string // the path that must exist afterwards, below root
	}{
		{guest.FilesIn, "/inner", 0, "srv/f"},
		{guest.FilesIn, "/inner/named", 0, "srv/named"},
		{guest.FilesIn, "/srv/top", 0, "f"},
		{guest.FilesIn, "/../../other", 0, "other"},
		{guest.FilesIn, "/outer/x", guest.FilesNoPath, ""},
		{guest.FilesIn, "/none/x", guest.FilesNoPath, ""},
		{guest.FilesIn, "/srv/f/x", 1, ""},
		{guest.FilesOut, "/outer/secret", guest.FilesNoPath, ""},
		{guest.FilesOut, "/none", guest.FilesNoPath, ""},
		{guest.FilesOut, "/fifo", guest.FilesIrregular, ""},
		{guest.FilesOut, "/inner/f", 0, "srv/f"},
		{"sideways", "/srv", 1, ""},
	} {
		var out, errs bytes.Buffer
		code := CopyFiles([]string{c.way, root, c.at}, bytes.NewReader(archive(t, "f", "content")), &out, &errs)
		if code != c.code || (code == 1) != (errs.Len() > 0) {
			t.Errorf("%s %s: code %d, %q, want %d", c.way, c.at, code, &errs, c.code)
		}
		if c.made == "" {
			continue
		}
		st, err := os.Lstat(filepath.Join(root, c.made))
		if err != nil || st.Mode() != 0o640 || st.Size() != 7 {
			t.Errorf("%s %s: %v, %v", c.way, c.at, st, err)
			continue
		}
		if sys := st.Sys().(*syscall.Stat_t); os.Geteuid() == 0 && strings.HasPrefix(c.made, "srv/") && (sys.Uid != 1234 || sys.Gid != 2345) {
			t.Errorf("%s %s: it belongs to %d:%d", c.way, c.at, sys.Uid, sys.Gid)
		}
	}
	if found, err := os.ReadDir(outside); err != nil || len(found) != 1 {
		t.Errorf("outside are %v, %v", found, err)
	}
}

// TestExecCopiesFiles checks that the host can copy files with exec calls.
func TestExecCopiesFiles(t *testing.T) {
	h := begin(t, nil).connect(t)
	dir := t.TempDir()
	big := strings.Repeat("0123456789abcde\n", guest.Window/8) // more than fits in a pipe and a window
	errtest.None(t, os.WriteFile(filepath.Join(dir, "big"), []byte(big), 0o640))
	if err := h.do(t, guest.Exec, guest.ExecCall{Files: guest.FilesOut, At: dir}, nil); err == nil {
		t.Error("files were copied before the workload ran")
	}
	h.must(t, guest.Run, shell("sleep 1000"), nil)

	var a guest.ExecAnswer
	h.must(t, guest.Exec, guest.ExecCall{Number: 1, Files: guest.FilesOut, At: filepath.Join(dir, "big")}, &a)
	r := tar.NewReader(strings.NewReader(h.printed(1) + string(a.Stdout)))
	e, err := r.Next()
	if err != nil || e.Name != "big" || e.Mode != 0o640 {
		t.Fatalf("the archive has %+v, %v; %+v", e, err, a)
	}
	if b, err := io.ReadAll(r); err != nil || string(b) != big {
		t.Errorf("the file has %d bytes, want %d: %v", len(b), len(big), err)
	}

	answered := make(chan guest.ExecAnswer, 1)
	call := func(number uint64) {
		go func() {
			var a guest.ExecAnswer
			if err := h.Call(t.Context(), guest.Exec, guest.ExecCall{Number: number, Stream: true, Input: true, Files: guest.FilesIn, At: dir}, &a); err != nil {
				t.Error(err)
			}
			answered <- a
		}()
		waittest.Until(t, "it takes input", func() bool {
			n := len(slices.DeleteFunc(h.methods(), func(m string) bool { return m != guest.Taken }))
			return n > 0
		})
	}
	call(2)
	errtest.None(t, h.Notify(guest.Input, guest.InputNote{Number: 2, Data: archive(t, "small", "content"), End: true}))
	if a := <-answered; a.Code != 0 {
		t.Errorf("the copy ended with %+v", a)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "small")); err != nil || string(b) != "content" {
		t.Errorf("the file has %q, %v", b, err)
	}
	h.mu.Lock()
	h.said = nil
	h.mu.Unlock()
	call(3)
	errtest.None(t, h.Notify(guest.Cancel, guest.CancelCall{Number: 3}))
	if a := <-answered; a.Code != 137 {
		t.Errorf("the canceled copy ended with %+v", a)
	}

	// A call with unknown, contradictory or missing fields is rejected as a whole.
	mark := filepath.Join(dir, "mark")
	for _, c := range []any{
		map[string]any{"command": []string{"touch", mark}, "later": "x"},
		guest.ExecCall{Command: []string{"touch", mark}, Files: guest.FilesOut, At: dir},
		guest.ExecCall{},
	} {
		if err := h.do(t, guest.Exec, c, nil); err == nil {
			t.Errorf("%+v was carried out", c)
		}
	}
	if _, err := os.Stat(mark); err == nil {
		t.Error("a command ran")
	}
}

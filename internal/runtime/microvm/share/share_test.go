package share

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/guest/files"
)

// limit bounds every wait. It is generous, because machines may be busy.
const limit = 2 * time.Minute

// asker is the guest's end of a connection.
type asker struct {
	t  testing.TB
	c  net.Conn
	k  files.Key
	in files.Stream
	id uint64
}

// dial opens a connection served by s. The caller must call end.
func dial(t testing.TB, s *Server) (a *asker, end func()) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	errtest.None(t, err)
	conn := func(fd int) net.Conn {
		f := os.NewFile(uintptr(fd), "pair")
		defer f.Close()
		c, err := net.FileConn(f)
		errtest.None(t, err)
		return c
	}
	a = &asker{t: t, c: conn(fds[0]), k: files.Key{byte(fds[0]), 1}}
	a.in.Reset(a.k)
	ctx, cancel := context.WithCancel(t.Context())
	there, began, ended := conn(fds[1]), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		if err := s.Serve(ctx, there, a.k, func() error { close(began); return nil }); err != nil {
			t.Errorf("serve: %v", err)
		}
	}()
	<-began
	return a, func() {
		cancel()
		<-ended
		a.c.Close()
	}
}

func (a *asker) send(q files.Request) {
	a.t.Helper()
	a.id++
	q.ID = a.id
	if err := a.c.SetDeadline(time.Now().Add(limit)); err != nil {
		a.t.Fatal(err)
	}
	if _, err := a.c.Write(files.AppendRequest(nil, a.k, &q)); err != nil {
		a.t.Fatal(err)
	}
}

func (a *asker) receive() files.Answer {
	a.t.Helper()
	buf := make([]byte, 1<<16)
	for {
		m, err := a.in.Next()
		if err != nil {
			a.t.Fatal(err)
		}
		if m != nil {
			got, err := files.ParseAnswer(m)
			if err != nil || got.ID != a.id {
				a.t.Fatalf("answer to %d, asked %d, %v", got.ID, a.id, err)
			}
			return got
		}
		n, err := a.c.Read(buf)
		if err != nil {
			a.t.Fatal(err)
		}
		a.in.Feed(buf[:n])
	}
}

func (a *asker) ask(q files.Request) files.Answer {
	a.t.Helper()
	a.send(q)
	return a.receive()
}

// must sends a request that has to succeed, and returns the answer.
func (a *asker) must(q files.Request) files.Answer {
	a.t.Helper()
	got := a.ask(q)
	if got.Errno != 0 {
		a.t.Fatalf("%+v: %v", q, unix.Errno(got.Errno))
	}
	return got
}

// workspace returns a directory of another user, or of this one if it is not
// root.
func workspace(t *testing.T) string {
	dir := filepath.Join(t.TempDir(), "work")
	errtest.None(t, os.Mkdir(dir, 0o755))
	if os.Geteuid() == 0 {
		errtest.None(t, os.Chown(dir, 12345, 12345))
		for p := filepath.Dir(dir); p != "/" && p != os.TempDir(); p = filepath.Dir(p) {
			errtest.None(t, os.Chmod(p, 0o755))
		}
	}
	return dir
}

// TestNothingOutside checks that requests reach nothing outside the workspace, with
// every kind of path that could lead there.
func TestNothingOutside(t *testing.T) {
	dir := workspace(t)
	out := filepath.Dir(dir)
	errtest.None(t, os.WriteFile(filepath.Join(out, "secret"), []byte("secret"), 0o666))
	errtest.None(t, os.Mkdir(filepath.Join(out, "other"), 0o777))
	for name, to := range map[string]string{"file": "../secret", "abs": filepath.Join(out, "secret"), "dir": "..", "self": "/proc/self/root", "loop": "loop", "proc": "/proc/self/cwd"} {
		errtest.None(t, os.Symlink(to, filepath.Join(dir, name)))
	}
	errtest.None(t, unix.Mkfifo(filepath.Join(dir, "pipe"), 0o666))
	a, end := dial(t, New(dir, false))
	defer end()
	for _, p := range []string{"file", "abs", "loop", "dir/secret", "self/etc/passwd", "proc/x", "dir/other", "pipe"} {
		for _, op := range []files.Op{files.Read, files.Write, files.Open, files.List, files.Sync, files.Create, files.Mkdir, files.RemoveDir, files.ReadLink} {
			got := a.ask(files.Request{Op: op, Path: p, Size: 100, Mask: files.ForWriting, Data: []byte("x")})
			if op == files.ReadLink && !strings.Contains(p, "/") && p != "pipe" || op == files.Write && len(got.Data) > 0 {
				continue
			}
			if got.Errno == 0 {
				t.Errorf("%d on %s: %+v", op, p, got)
			}
		}
		for _, q := range []files.Request{{Op: files.Link, Path: p, To: "l"}, {Op: files.Rename, Path: "dir/secret", To: "stolen"}, {Op: files.Rename, Path: "file", To: "dir/other/x"},
			{Op: files.Change, Path: p, Mask: files.SetSize}} {
			if q.Op == files.Link && !strings.Contains(p, "/") {
				continue // the hard link made here is to the symbolic link itself, which is inside
			}
			if got := a.ask(q); got.Errno == 0 {
				t.Errorf("%+v went well", q)
			}
		}
	}
	if b, err := os.ReadFile(filepath.Join(out, "secret")); err != nil || string(b) != "secret" {
		t.Errorf("what lies beside it is now %q, %v", b, err)
	}
	if l, err := os.ReadDir(out); err != nil || len(l) != 3 {
		t.Errorf("beside it lie %v, %v", l, err)
	}
}

// TestNothingSpecial checks that setuid and setgid files and devices can be neither
// created nor used.
func TestNothingSpecial(t *testing.T) {
	dir := workspace(t)
	a, end := dial(t, New(dir, false))
	defer end()
	refused := func(want unix.Errno, q files.Request) {
		t.Helper()
		if got := a.ask(q); unix.Errno(got.Errno) != want {
			t.Errorf("%+v: %v, want %v", q, unix.Errno(got.Errno), want)
		}
	}
	refused(unix.EPERM, files.Request{Op: files.Create, Path: "a", Mode: 0o4755})
	refused(unix.EPERM, files.Request{Op: files.Mkdir, Path: "a", Mode: 0o2755})
	a.must(files.Request{Op: files.Create, Path: "a", Mode: 0o755})
	refused(unix.EPERM, files.Request{Op: files.Change, Path: "a", Mask: files.SetMode, Mode: 0o4755})
	a.must(files.Request{Op: files.Close, Ino: a.must(files.Request{Op: files.Stat, Path: "a"}).Attr.Ino})
	errtest.None(t, os.Chmod(filepath.Join(dir, "a"), 0o755|os.ModeSetuid))
	refused(unix.EPERM, files.Request{Op: files.Write, Path: "a", Data: []byte("x")})
	refused(unix.EPERM, files.Request{Op: files.Open, Path: "a", Mask: files.ForWriting})
	refused(unix.EPERM, files.Request{Op: files.Change, Path: "a", Mask: files.SetSize})
	if os.Geteuid() != 0 {
		return
	}
	errtest.None(t, os.WriteFile(filepath.Join(dir, "roots"), []byte("x"), 0o600))
	refused(unix.EACCES, files.Request{Op: files.Read, Path: "roots", Size: 1})
	refused(unix.EACCES, files.Request{Op: files.Write, Path: "roots", Data: []byte("y")})
	refused(unix.EPERM, files.Request{Op: files.Change, Path: "roots", Mask: files.SetMode, Mode: 0o666})
	if err := unix.Mknod(filepath.Join(dir, "zero"), unix.S_IFCHR|0o666, 1<<8|5); err == nil {
		refused(unix.EPERM, files.Request{Op: files.Read, Path: "zero", Size: 1})
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(dir, "a"), &st); err != nil || st.Uid != 12345 || st.Gid != 12345 {
		t.Errorf("what was made belongs to %d:%d, %v", st.Uid, st.Gid, err)
	}
}

// TestAgain checks that a request repeated because its answer was lost succeeds and
// is not executed twice.
func TestAgain(t *testing.T) {
	dir := workspace(t)
	a, end := dial(t, New(dir, false))
	defer end()
	twice := func(q files.Request) {
		t.Helper()
		a.must(q)
		if got := a.ask(q); got.Errno == 0 {
			t.Errorf("%+v went well twice", q)
		}
		q.Again = true
		a.must(q)
	}
	twice(files.Request{Op: files.Mkdir, Path: "d", Mode: 0o755})
	twice(files.Request{Op: files.Create, Path: "f", Mode: 0o644})
	twice(files.Request{Op: files.Symlink, Path: "s", To: "f"})
	ino := a.must(files.Request{Op: files.Stat, Path: "f"}).Attr.Ino
	twice(files.Request{Op: files.Link, Path: "f", Ino: ino, To: "l"})
	twice(files.Request{Op: files.Rename, Path: "f", Ino: ino, To: "d/g"})
	twice(files.Request{Op: files.Remove, Path: "l"})
	a.must(files.Request{Op: files.Remove, Path: "d/g"})
	twice(files.Request{Op: files.RemoveDir, Path: "d"})
	if got := a.ask(files.Request{Op: files.Symlink, Path: "s", To: "another", Again: true}); unix.Errno(got.Errno) != unix.EEXIST {
		t.Errorf("another link: %v", unix.Errno(got.Errno))
	}
}

// TestOpenFiles checks that an open file stays usable by its inode number, is never
// mistaken for another file that has taken its name, and that the number of open
// files is limited.
func TestOpenFiles(t *testing.T) {
	dir := workspace(t)
	s := New(dir, false)
	a, end := dial(t, s)
	ino := a.must(files.Request{Op: files.Create, Path: "f", Mode: 0o444}).Attr.Ino
	a.must(files.Request{Op: files.Write, Path: "f", Ino: ino, Data: []byte("one")})
	end()
	a, end = dial(t, s)
	defer end()
	a.must(files.Request{Op: files.Write, Path: "f", Ino: ino, Off: 3, Data: []byte("two")})
	if st, err := os.Stat(filepath.Join(dir, "f")); err != nil || st.Mode() != 0o444 || st.Size() != 6 {
		t.Errorf("%v, %v", st, err)
	}
	for n := range maxOpen + 10 {
		name := fmt.Sprint("n", n)
		a.must(files.Request{Op: files.Create, Path: name, Mode: 0o644})
	}
	held := 0
	if l, err := os.ReadDir("/proc/self/fd"); err == nil {
		for _, e := range l {
			if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(to, dir+"/") {
				held++
			}
		}
	}
	if held > maxOpen {
		t.Errorf("%d files are held open", held)
	}
	errtest.None(t, os.Rename(filepath.Join(dir, "n1"), filepath.Join(dir, "f")))
	if got := a.ask(files.Request{Op: files.Read, Path: "f", Ino: ino, Size: 10}); unix.Errno(got.Errno) != unix.ESTALE {
		t.Errorf("another file was read as the one that was open: %v", unix.Errno(got.Errno))
	}
}

// TestLists checks that a directory of any size is listed completely.
func TestLists(t *testing.T) {
	dir := workspace(t)
	const n = 5000
	for i := range n {
		errtest.None(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("some-longer-name-%d", i)), nil, 0o644))
	}
	errtest.None(t, os.WriteFile(filepath.Join(dir, files.Hidden+"x"), nil, 0o644))
	a, end := dial(t, New(dir, false))
	defer end()
	seen, at := map[string]bool{}, int64(0)
	for {
		l, err := files.ParseEntries(a.must(files.Request{Op: files.List, Off: at}).Data)
		if err != nil {
			t.Fatal(err)
		}
		if len(l) == 0 {
			break
		}
		for _, e := range l {
			seen[e.Name] = true
		}
		at = l[len(l)-1].Next
	}
	if len(seen) != n {
		t.Errorf("%d of %d names", len(seen), n)
	}
}

// TestHold checks that no request starts between Hold and Release, and that one
// that has arrived is reported.
func TestHold(t *testing.T) {
	dir := workspace(t)
	s := New(dir, false)
	a, end := dial(t, s)
	a.must(files.Request{Op: files.Stat})
	// The server sends an answer before it clears the request.
	waittest.Until(t, "nothing is pending once everything was answered", func() bool { return s.Pending() == "" })
	s.Hold()
	a.send(files.Request{Op: files.Mkdir, Path: "d", Mode: 0o755})
	for began := time.Now(); s.Pending() == ""; time.Sleep(time.Millisecond) {
		if time.Since(began) > limit {
			t.Fatal("no one reports that a request waits")
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "d")); !os.IsNotExist(err) {
		t.Errorf("it was done while held: %v", err)
	}
	s.Release()
	if got := a.receive(); got.Errno != 0 {
		t.Errorf("after it: %v", unix.Errno(got.Errno))
	}
	s.Hold()
	a.send(files.Request{Op: files.Mkdir, Path: "e", Mode: 0o755})
	end() // end the connection, so that the guest would repeat the request
	s.Release()
	a, end = dial(t, s)
	defer end()
	if _, err := os.Stat(filepath.Join(dir, "e")); !os.IsNotExist(err) {
		t.Errorf("it was done for a connection that is gone: %v", err)
	}
	a.must(files.Request{Op: files.Mkdir, Path: "e", Mode: 0o755, Again: true})
}

// TestMet checks that a guest counts as announced once the requests that it repeats
// on a connection are known, and that a later connection needs a new announcement.
func TestMet(t *testing.T) {
	s := New(workspace(t), false)
	for range 2 {
		a, end := dial(t, s)
		a.must(files.Request{Op: files.Stat})
		if s.Met() {
			t.Error("it is met before it has asked for everything again")
		}
		a.id = ^uint64(0) // the next is HelloID
		a.must(files.Request{Op: files.Stat})
		if !s.Met() {
			t.Error("it has announced itself and is not met")
		}
		end()
		waittest.Until(t, "its connection is over", func() bool { return !s.Met() })
	}
}

// TestReadOnly checks that every request that would change anything is refused.
func TestReadOnly(t *testing.T) {
	dir := workspace(t)
	errtest.None(t, os.WriteFile(filepath.Join(dir, "f"), []byte("text"), 0o644))
	a, end := dial(t, New(dir, true))
	defer end()
	if got := a.must(files.Request{Op: files.Read, Path: "f", Size: 10}); string(got.Data) != "text" {
		t.Errorf("read %q", got.Data)
	}
	for op := files.Stat; op <= files.Close; op++ {
		q := files.Request{Op: op, Path: "f", Mask: files.ForWriting, Data: []byte("x")}
		switch op {
		case files.Rename, files.Link, files.Symlink:
			q.To = "g"
		case files.Mkdir, files.Create:
			q.Path = "g"
		}
		got := a.ask(q)
		if changes := changes(&q); changes != (unix.Errno(got.Errno) == unix.EROFS) {
			t.Errorf("operation %d: %v", op, unix.Errno(got.Errno))
		}
	}
	if l, err := os.ReadDir(dir); err != nil || len(l) != 1 {
		t.Errorf("%v, %v", l, err)
	}
}

// TestDirectoryAway checks that every request gets an errno while the directory is
// missing, and that a directory that appears later is served on the same
// connection.
func TestDirectoryAway(t *testing.T) {
	dir := workspace(t)
	errtest.None(t, os.Remove(dir))
	s := New(dir, false)
	a, end := dial(t, s)
	defer end()
	lacks := func(a *asker) {
		t.Helper()
		for op := files.Stat; op <= files.Close; op++ {
			q := files.Request{Op: op, Path: "f"}
			if op == files.Rename || op == files.Link || op == files.Symlink {
				q.To = "g"
			}
			if got := a.ask(q); unix.Errno(got.Errno) != unix.ENOENT {
				t.Errorf("operation %d: %v", op, unix.Errno(got.Errno))
			}
		}
		if got := s.Fault(); !strings.Contains(got, dir) || !strings.Contains(got, unix.ENOENT.Error()) {
			t.Errorf("the fault: %q", got)
		}
	}
	lacks(a)
	errtest.None(t, os.Mkdir(dir, 0o755))
	waittest.Until(t, "the fault ends without a request", func() bool { return s.Fault() == "" })
	a.must(files.Request{Op: files.Create, Path: "f", Mode: 0o644})
	errtest.None(t, os.RemoveAll(dir))
	a.send(files.Request{Op: files.Stat, Path: "f"})
	if _, err := a.c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Fatalf("the connection whose directory was removed: %v", err)
	}
	b, over := dial(t, s)
	defer over()
	lacks(b)
}

// FuzzRequests checks that random requests touch nothing outside the directory, and
// that each is answered.
func FuzzRequests(f *testing.F) {
	for _, q := range []files.Request{{Op: files.Create, Path: "a", Mode: 0o644}, {Op: files.Rename, Path: "a", To: "b"}, {Op: files.Symlink, Path: "l", To: "/etc"}} {
		f.Add(uint8(q.Op), q.Path, q.To, uint64(0), int64(0), uint32(0), q.Mode, uint32(0), []byte("x"))
	}
	parent := f.TempDir()
	dir := filepath.Join(parent, "work")
	if err := os.Mkdir(dir, 0o755); err != nil {
		f.Fatal(err)
	}
	r, err := openRoot(dir)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, op uint8, path, to string, ino uint64, off int64, size, mode, mask uint32, data []byte) {
		b := files.AppendRequest(nil, files.Key{}, &files.Request{ID: 1, Op: files.Op(op), Path: path, To: to, Ino: ino, Off: off, Size: size, Mode: mode, Mask: mask, Data: data})
		q, err := files.ParseRequest(b[20:])
		if err != nil {
			return
		}
		if q.Op == files.Change && q.Off > 1<<20 {
			return // do not create huge sparse files
		}
		if q.Op == files.Write && q.Off > 1<<20 {
			return
		}
		if a := r.answer(&q, nil); a.ID != 1 {
			t.Fatalf("%+v", a)
		}
		if l, err := os.ReadDir(parent); err != nil || len(l) != 1 {
			t.Fatalf("%v, %v", l, err)
		}
	})
}

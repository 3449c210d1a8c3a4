package etcd

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/store"
)

// childDir is the environment variable with the data directory when this test
// binary runs as the child of TestKill.
const childDir = "LULL_TEST_ETCD_CHILD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		if err := child(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// child writes numbers forever and prints each when it is acknowledged.
func child(dir string) error {
	s, err := OpenEmbedded(context.Background(), EmbeddedConfig{Dir: dir, ShortTicks: true})
	if err != nil {
		return err
	}
	for i := 0; ; i++ {
		_, err := s.Commit(context.Background(), store.Txn{Then: []store.Op{
			store.Put("n", fmt.Append(nil, i)), store.Put(fmt.Sprintf("k/%06d", i), nil),
		}})
		if err != nil {
			return err
		}
		fmt.Println(i)
	}
}

// TestKill kills a process that writes. It checks that every acknowledged write
// is still there, and no part of an unfinished transaction.
func TestKill(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	for round := range 4 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childDir+"="+dir)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		errtest.None(t, err)
		errtest.None(t, cmd.Start())
		acked, lines := -1, bufio.NewScanner(out)
		for lines.Scan() {
			if acked, err = strconv.Atoi(lines.Text()); err != nil {
				t.Fatal(err)
			}
			if acked == 30+17*round {
				errtest.None(t, cmd.Process.Kill())
			}
		}
		_ = cmd.Wait() // the error only says that the process was killed
		s := openTest(t, EmbeddedConfig{Dir: dir})
		n, err := store.Get(t.Context(), s, "n")
		errtest.None(t, err)
		last, err := strconv.Atoi(string(n.Data))
		if err != nil || last < acked {
			t.Errorf("round %d: the last write is %d, %v, acknowledged were %d", round, last, err, acked)
		}
		page, err := store.List(t.Context(), s, store.Prefix("k/"))
		if err != nil || len(page.Values) <= last {
			t.Errorf("round %d: %d keys, %v, want more than %d", round, len(page.Values), err, last)
		}
		closeTest(t, s)
	}
}

// sockets returns this process's sockets by inode. listening contains those that
// others can reach, each with its line of /proc/net.
func sockets(t *testing.T) (all, listening map[string]string) {
	t.Helper()
	all, listening = map[string]string{}, map[string]string{}
	fds, err := os.ReadDir("/proc/self/fd")
	errtest.None(t, err)
	for _, fd := range fds {
		link, err := os.Readlink("/proc/self/fd/" + fd.Name())
		if inode, ok := strings.CutPrefix(link, "socket:["); err == nil && ok {
			all[strings.TrimSuffix(inode, "]")] = link
		}
	}
	for table, column := range map[string]int{"tcp": 9, "tcp6": 9, "udp": 9, "udp6": 9, "raw": 9, "raw6": 9, "unix": 6} {
		data, err := os.ReadFile("/proc/self/net/" + table)
		if err != nil {
			continue // a kernel without IPv6
		}
		for line := range strings.Lines(string(data)) {
			f := strings.Fields(line)
			if len(f) <= column || all[f[column]] == "" {
				continue
			}
			// 0A is TCP's LISTEN, 00010000 is SO_ACCEPTCON. A bound datagram or
			// raw socket can be reached without listening.
			if f[3] == "0A" || (table == "unix" && f[3] == "00010000") || !strings.HasPrefix(table, "tcp") && table != "unix" {
				listening[f[column]] = table + " " + line
			}
		}
	}
	return all, listening
}

// TestNoSockets checks that the embedded server opens no socket, so other users
// cannot reach it.
func TestNoSockets(t *testing.T) {
	before, listened := sockets(t) // includes those that reserve ports for the tests
	s := openTest(t, EmbeddedConfig{})
	errtest.Get(s.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put("a", nil)}}))(t)
	after, listening := sockets(t)
	for inode := range after {
		if before[inode] == "" {
			t.Errorf("a socket was opened: %s", inode)
		}
	}
	if len(listening) > len(listened) {
		t.Errorf("listening: %v", listening)
	}
	// First make sure that the list would show the sockets that etcd opens by
	// default.
	for _, at := range [][2]string{{"tcp", "127.0.0.1:0"}, {"unix", "@lull-etcd-test"}, {"unix", filepath.Join(t.TempDir(), "s")}} {
		l, err := net.Listen(at[0], at[1])
		errtest.None(t, err)
		if _, listening := sockets(t); len(listening) != len(listened)+1 {
			t.Errorf("a listener on %v shows as %v", at, listening)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "outer", "data")
	s := openTest(t, EmbeddedConfig{Dir: dir})
	_, err := OpenEmbedded(t.Context(), EmbeddedConfig{Dir: dir, ShortTicks: true})
	if err == nil || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), fmt.Sprintf("process %d", os.Getpid())) {
		t.Errorf("second open of %q: %v", dir, err)
	}
	if err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil && info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	closeTest(t, s)
	errtest.None(t, os.Chmod(dir, 0o755))
	s = openTest(t, EmbeddedConfig{Dir: dir})
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("an open directory was left as %v, %v", info.Mode(), err)
	}
	closeTest(t, s)
	if _, err := OpenEmbedded(t.Context(), EmbeddedConfig{}); err == nil {
		t.Error("a data directory without a name was opened")
	}
	file := filepath.Join(t.TempDir(), "file")
	errtest.None(t, os.WriteFile(file, nil, 0o600))
	if _, err := OpenEmbedded(t.Context(), EmbeddedConfig{Dir: file}); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("a file as data directory: %v", err)
	}
}

// TestLeasesEndWithTheProcess checks that a key held under a long lease can be
// claimed at once by the next process after its holder was killed.
func TestLeasesEndWithTheProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	for round := range 2 {
		s, err := OpenEmbedded(t.Context(), EmbeddedConfig{Dir: dir, ShortTicks: true, NoSync: true})
		if err != nil {
			t.Fatal(err)
		}
		lease, err := s.Grant(t.Context(), time.Hour)
		if err == nil {
			_, err = store.Claim(t.Context(), s, lease, "k", []byte("{}"))
		}
		if err := errors.Join(err, s.Close()); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
	}
}

// TestClosed checks that every call after Close is refused, and that leases are
// reported as lost.
func TestClosed(t *testing.T) {
	s := openTest(t, EmbeddedConfig{})
	l, err := s.Grant(t.Context(), time.Minute)
	errtest.None(t, err)
	watch := s.Watch(t.Context(), store.Prefix(""), 0)
	closeTest(t, s)
	closeTest(t, s)
	<-l.Lost()
	for b := range watch {
		if b.Err != nil && !errors.Is(b.Err, store.ErrUnavailable) {
			t.Errorf("watch ended with %v", b.Err)
		}
	}
	_, err = s.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put("a", nil)}})
	if !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("commit after close: %v", err)
	}
	if b := <-s.Watch(t.Context(), store.Prefix(""), 1); !errors.Is(b.Err, store.ErrUnavailable) {
		t.Errorf("watch after close: %v", b.Err)
	}
}

// TestCloseLeavesNothing checks that Close ends every goroutine that the store
// started.
func TestCloseLeavesNothing(t *testing.T) {
	open := func() {
		s := openTest(t, EmbeddedConfig{})
		errtest.Get(s.Grant(t.Context(), time.Minute))(t)
		s.Watch(t.Context(), store.Prefix(""), 0)
		closeTest(t, s)
	}
	open() // once before the count, for what etcd starts only once per process
	before := runtime.NumGoroutine()
	for range 3 {
		open()
	}
	waittest.NoGoroutines(t, before)
}

// TestNoSpace fills the store to its quota. It checks that the store then refuses
// to grow, still allows deletes, and regains space while Run is running.
func TestNoSpace(t *testing.T) {
	s := openTest(t, EmbeddedConfig{QuotaBytes: 16 << 20, NoSync: true})
	fillAndFree(t, s)
}

func fillAndFree(t *testing.T, s *Store) {
	t.Helper()
	data := bytes.Repeat([]byte("x"), 1<<20)
	write := func() error {
		_, err := s.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put("big", data)}})
		return err
	}
	var err error
	for i := 0; err == nil; i++ {
		if i > 100 {
			t.Fatal("100 MiB went into a store of 16 MiB")
		}
		err = write()
	}
	if !errors.Is(err, store.ErrNoSpace) {
		t.Fatalf("a full store says %v", err)
	}
	if _, err := s.Commit(t.Context(), store.Txn{Then: []store.Op{store.Delete("other")}}); err != nil {
		t.Errorf("delete in a full store: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- s.Run(ctx) }()
	waittest.Until(t, "the store frees itself", func() bool {
		err := write()
		if err != nil && !errors.Is(err, store.ErrNoSpace) {
			t.Fatalf("after the store was full: %v", err)
		}
		return err == nil
	})
	cancel()
	if err := <-ran; !errors.Is(err, context.Canceled) {
		t.Errorf("Run ended with %v", err)
	}
}

func TestHistoryIsBounded(t *testing.T) {
	s := openTest(t, EmbeddedConfig{KeepRevisions: 50, NoSync: true})
	var last int64
	for i := range 200 {
		res, err := s.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put("a", fmt.Append(nil, i))}})
		if err != nil {
			t.Fatal(err)
		}
		last = res.Revision
	}
	errtest.None(t, s.maintain(t.Context()))
	for back, want := range map[int64]error{50: nil, 51: store.ErrCompacted, 150: store.ErrCompacted} {
		if _, err := s.Range(t.Context(), store.Query{Keys: store.Key("a"), Revision: last - back}); !errors.Is(err, want) {
			t.Errorf("%d revisions back: %v, want %v", back, err, want)
		}
	}
	if err := s.maintain(t.Context()); err != nil {
		t.Errorf("maintenance with nothing to do: %v", err)
	}
}

func TestLogger(t *testing.T) {
	var out bytes.Buffer
	lg := zapLogger(slog.New(slog.NewTextHandler(&out, nil)))
	lg.Info("quiet")
	lg.Warn("noted")
	lg.Sugar().Errorw("loud", "key", "value")
	func() {
		defer func() {
			if recover() == nil {
				t.Error("a fatal message did not panic")
			}
		}()
		lg.Fatal("over")
	}()
	got := out.String()
	for _, want := range []string{"level=INFO msg=noted part=etcd", "level=ERROR msg=loud part=etcd key=value", "msg=over"} {
		if !strings.Contains(got, want) {
			t.Errorf("log lacks %q:\n%s", want, got)
		}
	}
	if strings.Contains(got, "quiet") {
		t.Errorf("log has etcd's small talk:\n%s", got)
	}
}

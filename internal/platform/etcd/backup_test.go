package etcd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"lull/internal/lib/errtest"
	"lull/internal/store"
)

func backupOf(t *testing.T, s *Store) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "backup")
	errtest.None(t, s.Backup(t.Context(), path))
	return path
}

func TestBackupRestore(t *testing.T) {
	s := openTest(t, EmbeddedConfig{})
	var before store.Result
	for i := range 20 {
		var err error
		before, err = s.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put(fmt.Sprintf("k/%d", i%7), fmt.Append(nil, i))}})
		if err != nil {
			t.Fatal(err)
		}
	}
	want, err := store.List(t.Context(), s, store.Prefix(""))
	errtest.None(t, err)
	path := backupOf(t, s)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("backup has mode %v, %v", info.Mode(), err)
	}
	if err := s.Backup(t.Context(), path); !errors.Is(err, os.ErrExist) {
		t.Errorf("backup over a backup: %v", err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("the backup left %v, %v", left, err)
	}
	errtest.Get(s.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put("after", nil)}}))(t)
	dir := filepath.Join(t.TempDir(), "new", "data")
	errtest.None(t, Restore(path, dir))
	for range 2 { // a second time, after the restart
		checkRestored(t, dir, want, before.Revision)
	}
	if err := Restore(path, dir); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("restore over a store: %v", err)
	}
}

func checkRestored(t *testing.T, dir string, want store.Page, newest int64) {
	t.Helper()
	s := openTest(t, EmbeddedConfig{Dir: dir})
	defer closeTest(t, s)
	got, err := store.List(t.Context(), s, store.Prefix("k/"))
	if err != nil || fmt.Sprint(got.Values) != fmt.Sprint(want.Values) {
		t.Errorf("restored %v, %v, want %v", got.Values, err, want.Values)
	}
	if got.Revision < newest+revisionGap {
		t.Errorf("restored at revision %d, want at least %d", got.Revision, newest+revisionGap)
	}
	if b := <-s.Watch(t.Context(), store.Prefix(""), newest); !errors.Is(b.Err, store.ErrCompacted) {
		t.Errorf("watch from before the restore: %+v", b)
	}
	res, err := s.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put("new", nil)}})
	if err != nil || res.Revision <= got.Revision {
		t.Errorf("write after the restore: %+v, %v", res, err)
	}
}

// TestRestoreRefuses damages a backup in several ways. Each time Restore must
// return an error that names the file, and leave nothing behind.
func TestRestoreRefuses(t *testing.T) {
	s := openTest(t, EmbeddedConfig{})
	errtest.Get(s.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put("a", []byte("1"))}}))(t)
	good, err := os.ReadFile(backupOf(t, s))
	errtest.None(t, err)
	flip := func(at int) []byte {
		bad := append([]byte(nil), good...)
		bad[at] ^= 1
		return bad
	}
	plain := newSumCheck()
	notes := make([]byte, 2*pageBytes)
	copy(notes, "not a database")
	plain.hash.Write(notes)
	for what, c := range map[string]struct {
		data []byte
		why  string
	}{
		"empty":            {nil, "truncated"},
		"a checksum only":  {good[:sumBytes], "truncated"},
		"cut short":        {good[:len(good)/2+7], "truncated"},
		"cut at a page":    {good[:len(good)-pageBytes], "corrupted"},
		"without checksum": {good[:len(good)-sumBytes], "truncated"},
		"longer":           {append(good[:len(good):len(good)], 'x'), "truncated"},
		"bit in a page":    {flip(len(good) / 2), "corrupted"},
		"first bit":        {flip(0), "corrupted"},
		"bit in the sum":   {flip(len(good) - 1), "corrupted"},
		"something else":   {plain.hash.Sum(notes), "not a database"},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "backup")
		errtest.None(t, os.WriteFile(path, c.data, 0o600))
		err := Restore(path, filepath.Join(dir, "data"))
		if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: %v, want %q and the file's name", what, err, c.why)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
			t.Errorf("%s: left %v, %v", what, left, err)
		}
	}
	if err := Restore(filepath.Join(t.TempDir(), "none"), filepath.Join(t.TempDir(), "data")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no backup: %v", err)
	}
}

// FuzzBackupCheck checks that no damaged backup passes verification.
func FuzzBackupCheck(f *testing.F) {
	f.Add([]byte{}, 0, byte(1))
	f.Add(make([]byte, pageBytes), 3, byte(0))
	f.Add(make([]byte, 2*pageBytes), pageBytes, byte(255))
	f.Fuzz(func(t *testing.T, pages []byte, at int, change byte) {
		sum := newSumCheck()
		sum.hash.Write(pages)
		file := sum.hash.Sum(append([]byte(nil), pages...))
		if change != 0 && at >= 0 && at < len(file) {
			file[at] ^= change
		} else {
			change = 0
		}
		check := newSumCheck()
		for i := 0; i < len(file); i += 7 {
			errtest.Get(check.Write(file[i:min(i+7, len(file))]))(t)
		}
		whole := len(pages) > 0 && len(pages)%pageBytes == 0 && change == 0
		if err := check.verify(); (err == nil) != whole {
			t.Fatalf("%d bytes, byte %d changed by %d: %v", len(pages), at, change, err)
		}
	})
}

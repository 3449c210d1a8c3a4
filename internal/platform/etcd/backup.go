package etcd

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
)

// A backup is in etcd's own snapshot format, which etcd's tools can read too: the
// database, whose size is a multiple of the page size, followed by its SHA-256.
const (
	pageBytes = 512
	sumBytes  = sha256.Size
)

// Backup writes a copy of the store at one revision to a new file at path, as
// SaveBackup does. The store remains usable in the meantime.
func (s *Store) Backup(ctx context.Context, path string) error {
	snapshot, err := s.Snapshot(ctx)
	if err != nil {
		return err
	}
	return errors.Join(SaveBackup(path, snapshot), snapshot.Close())
}

// Snapshot returns a copy of the store at one revision, in the format of a
// backup. The caller must close it.
func (s *Store) Snapshot(ctx context.Context) (io.ReadCloser, error) {
	snapshot, err := s.client.Snapshot(ctx)
	if err != nil {
		return nil, readError("read a snapshot", err)
	}
	return snapshot, nil
}

// SaveBackup writes a snapshot to a new file at path. It is an error if path
// exists. The file appears only once it is complete, verified and on disk, and is
// readable by its owner only.
func SaveBackup(path string, snapshot io.Reader) (err error) {
	if _, err := os.Lstat(path); err == nil {
		return fmt.Errorf("cannot write backup %q: %w", path, os.ErrExist)
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".backup-*")
	if err != nil {
		return fmt.Errorf("cannot write backup: %w", err)
	}
	defer func() {
		if gone := os.Remove(tmp.Name()); gone != nil {
			err = errors.Join(err, fmt.Errorf("cannot remove %q: %w", tmp.Name(), gone))
		}
	}()
	check := newSumCheck()
	_, err = io.Copy(io.MultiWriter(tmp, check), snapshot)
	if err == nil {
		err = check.verify()
	}
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return fmt.Errorf("cannot write backup %q: %w", path, err)
	}
	// A link, unlike a rename, never replaces an existing file.
	if err := os.Link(tmp.Name(), path); err != nil {
		return fmt.Errorf("cannot write backup: %w", err)
	}
	return syncDir(filepath.Dir(path))
}

// sumCheck is a writer that hashes all of its input but the last sumBytes, which
// it keeps.
type sumCheck struct {
	hash hash.Hash
	tail []byte
	size int64
}

func newSumCheck() *sumCheck { return &sumCheck{hash: sha256.New()} }

func (c *sumCheck) Write(p []byte) (int, error) {
	c.size += int64(len(p))
	c.tail = append(c.tail, p...)
	if over := len(c.tail) - sumBytes; over > 0 {
		c.hash.Write(c.tail[:over])
		c.tail = append(c.tail[:0], c.tail[over:]...)
	}
	return len(p), nil
}

// verify returns an error if the backup is incomplete or corrupt.
func (c *sumCheck) verify() error {
	switch {
	case c.size <= sumBytes || (c.size-sumBytes)%pageBytes != 0:
		return fmt.Errorf("truncated: %d bytes are not whole pages and a checksum", c.size)
	case !bytes.Equal(c.hash.Sum(nil), c.tail):
		return errors.New("corrupted: the checksum does not match")
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("cannot sync directory: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("cannot sync directory %q: %w", dir, err)
	}
	return nil
}

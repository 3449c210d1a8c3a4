package etcd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	bolt "go.etcd.io/bbolt"
	"go.etcd.io/etcd/server/v3/storage/datadir"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
	"go.etcd.io/etcd/server/v3/storage/schema"
)

// revisionGap is added to the revision of a restored store, so that the new store
// does not reuse a revision that was issued after the backup. A watch from such a
// revision fails, because its history is gone.
const revisionGap = 1_000_000_000

// Restore creates the data directory dir, for OpenEmbedded, from the backup at
// path. dir must not exist or must be empty. If the file is truncated or corrupt,
// Restore returns an error and leaves dir unchanged. The restored store has none
// of the cluster's members and users, and its revision is higher by revisionGap.
func Restore(path, dir string) (err error) {
	if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
		return fmt.Errorf("cannot restore into %q: the directory is not empty", dir)
	} else if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("cannot restore into %q: %w", dir, err)
	}
	parent := filepath.Dir(filepath.Clean(dir))
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return fmt.Errorf("cannot restore: %w", err)
	}
	tmp, err := os.MkdirTemp(parent, ".restore-*") // mode 0700
	if err != nil {
		return fmt.Errorf("cannot restore: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	member := filepath.Join(tmp, etcdDir)
	if err := os.MkdirAll(datadir.ToSnapDir(member), 0o700); err != nil {
		return fmt.Errorf("cannot restore: %w", err)
	}
	db := datadir.ToBackendFileName(member)
	if err := copyChecked(path, db); err != nil {
		return fmt.Errorf("cannot restore from %q: %w", path, err)
	}
	if err := rewrite(db); err != nil {
		return fmt.Errorf("cannot restore from %q: %w", path, err)
	}
	// Rename succeeds over an empty directory and fails over any other.
	if err := os.Rename(tmp, dir); err != nil {
		return fmt.Errorf("cannot restore: %w", err)
	}
	return syncDir(parent)
}

// copyChecked copies the database of the backup at from, without its checksum, to
// the file to, and verifies it.
func copyChecked(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	check := newSumCheck()
	_, err = io.Copy(io.MultiWriter(out, check), in)
	if err == nil {
		err = check.verify()
	}
	if err == nil {
		err = out.Truncate(check.size - sumBytes)
	}
	return errors.Join(err, out.Close())
}

// rewrite turns the database into that of a new cluster: no position in a raft
// log, no members, no users, no alarms, and a revision that was never issued.
func rewrite(path string) error {
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		return fmt.Errorf("not a database: %w", err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		keys, meta := tx.Bucket(schema.Key.Name()), tx.Bucket(schema.Meta.Name())
		if keys == nil || meta == nil {
			return errors.New("not the database of a store")
		}
		revision := lastRevision(keys, meta)
		for _, name := range [][]byte{schema.MetaConsistentIndexKeyName, schema.MetaTermKeyName, schema.MetaConfStateName} {
			if err := meta.Delete(name); err != nil {
				return err
			}
		}
		// A scheduled compaction of a revision beyond the last change makes etcd
		// continue from there when it opens the store.
		rev := mvcc.RevToBytes(mvcc.Revision{Main: revision + revisionGap}, mvcc.NewRevBytes())
		if err := meta.Put(schema.ScheduledCompactKeyName, rev); err != nil {
			return err
		}
		return emptyBuckets(tx)
	})
	return errors.Join(err, db.Close())
}

func emptyBuckets(tx *bolt.Tx) error {
	for _, b := range [][]byte{
		schema.Members.Name(), schema.MembersRemoved.Name(), schema.Cluster.Name(), schema.Alarm.Name(),
		schema.Auth.Name(), schema.AuthUsers.Name(), schema.AuthRoles.Name(),
	} {
		if tx.Bucket(b) == nil {
			continue
		}
		if err := tx.DeleteBucket(b); err != nil {
			return err
		}
		if _, err := tx.CreateBucket(b); err != nil {
			return err
		}
	}
	return nil
}

// lastRevision returns the newest revision in the database.
func lastRevision(keys, meta *bolt.Bucket) int64 {
	last := int64(1)
	if k, _ := keys.Cursor().Last(); len(k) >= 8 {
		last = int64(binary.BigEndian.Uint64(k))
	}
	for _, name := range [][]byte{schema.ScheduledCompactKeyName, schema.FinishedCompactKeyName} {
		if v := meta.Get(name); len(v) >= 8 {
			last = max(last, int64(binary.BigEndian.Uint64(v)))
		}
	}
	return last
}

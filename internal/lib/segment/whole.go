package segment

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// temporary is the prefix of the names of files being written.
const temporary = ".lull-tmp-"

// WriteFile replaces a file durably: after a crash at any instant it contains
// either all of its previous content or all of data. It writes a temporary file
// in the same folder, so the folder must be writable and have space for both.
func WriteFile(path string, data []byte, perm fs.FileMode) error {
	if err := writeFile(path, data, perm); err != nil {
		return fmt.Errorf("cannot write %s: %w", path, err)
	}
	return nil
}

func writeFile(path string, data []byte, perm fs.FileMode) error {
	dir := filepath.Dir(path)
	out, err := os.CreateTemp(dir, temporary)
	if err != nil {
		return err
	}
	_, err = out.Write(data)
	if err == nil {
		err = out.Chmod(perm)
	}
	if err == nil {
		err = out.Sync()
	}
	err = errors.Join(err, out.Close())
	if err == nil {
		err = os.Rename(out.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(out.Name()))
	}
	return syncDir(dir)
}

// WriteAll replaces files of one folder durably. After a crash at any instant,
// each file contains either its previous or its new content. files contains the
// contents by name. Each file is synced on its own; on Linux, for more than 64
// files, the whole file system is synced once. WriteAll calls replace for each
// file once its content is on disk; replace must call rename unless the file must
// not change.
func WriteAll(dir string, files map[string][]byte, perm fs.FileMode, replace func(name string, rename func() error) error) error {
	if err := writeAll(dir, files, perm, replace); err != nil {
		return fmt.Errorf("cannot write %d files in %s: %w", len(files), dir, err)
	}
	return nil
}

func writeAll(dir string, files map[string][]byte, perm fs.FileMode, replace func(name string, rename func() error) error) (err error) {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	temps := map[string]string{} // temporary files not renamed yet, by name
	defer func() {
		for _, temp := range temps {
			err = errors.Join(err, os.Remove(temp))
		}
	}()
	for name, data := range files {
		out, err := os.CreateTemp(dir, temporary)
		if err != nil {
			return err
		}
		temps[name] = out.Name()
		_, err = out.Write(data)
		if err = errors.Join(err, out.Chmod(perm), out.Close()); err != nil {
			return err
		}
	}
	if err := syncAll(d, temps); err != nil {
		return err
	}
	for name, temp := range temps {
		err := replace(name, func() error {
			err := os.Rename(temp, filepath.Join(dir, name))
			if err == nil {
				delete(temps, name)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return d.Sync()
}

// syncEach makes the content of files durable, one after the other.
func syncEach(paths map[string]string) error {
	var errs []error
	for _, path := range paths {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err == nil {
			err = errors.Join(f.Sync(), f.Close())
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// syncDir makes the names in a folder durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// RemoveTemporary removes the files that a crash during WriteFile left in a
// folder, and returns their number. No other process may be writing there.
func RemoveTemporary(dir string) (int, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, fmt.Errorf("cannot clean %s: %w", dir, err)
	}
	n := 0
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), temporary) && e.Type().IsRegular() {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return n, fmt.Errorf("cannot clean %s: %w", dir, err)
			}
			n++
		}
	}
	return n, nil
}

// seal is the first line of a sealed file.
const seal = "lull-record 1 sha256=%s len=%d\n"

// maxSealLine is an upper bound for the length of the first line.
const maxSealLine = 128

// Seal returns payload with a first line that contains version, checksum and
// length.
func Seal(payload []byte) []byte {
	sum := sha256.Sum256(payload)
	return append(fmt.Appendf(nil, seal, hex.EncodeToString(sum[:]), len(payload)), payload...)
}

// SealError means that a sealed file is damaged.
type SealError struct {
	Name string // name of the file
	What string // the fault
}

func (e *SealError) Error() string {
	return fmt.Sprintf("cannot read the record %s: %s; restore it from a backup, or move it away to continue without it", e.Name, e.What)
}

// Unseal checks a sealed file and returns its payload, which shares memory with
// data. name is used in the *SealError.
func Unseal(name string, data []byte) ([]byte, error) {
	fault := func(format string, args ...any) ([]byte, error) {
		return nil, &SealError{Name: name, What: fmt.Sprintf(format, args...)}
	}
	if len(data) == 0 {
		return fault("it is empty")
	}
	line, payload, found := bytes.Cut(data, []byte("\n"))
	if len(line) > maxSealLine || !strings.HasPrefix(string(line)+"\n", "lull-record ") {
		return fault("it does not begin with a lull-record line")
	}
	if !found {
		return fault("it is cut off in its first line")
	}
	fields := strings.Split(string(line), " ")
	if fields[1] != "1" {
		return fault("its version is %q and this program reads 1", fields[1])
	}
	var sum, size string
	if len(fields) == 4 {
		sum, _ = strings.CutPrefix(fields[2], "sha256=")
		size, _ = strings.CutPrefix(fields[3], "len=")
	}
	n, err := strconv.ParseUint(size, 10, 63)
	if err != nil || fmt.Sprintf(seal, sum, n) != string(line)+"\n" || len(sum) != 2*sha256.Size {
		return fault("its first line is damaged")
	}
	switch {
	case uint64(len(payload)) < n:
		return fault("it is truncated: %d of %d bytes are there", len(payload), n)
	case uint64(len(payload)) > n:
		return fault("%d bytes follow its end", uint64(len(payload))-n)
	}
	if got := sha256.Sum256(payload); hex.EncodeToString(got[:]) != sum {
		return fault("its checksum is wrong")
	}
	return payload, nil
}

// WriteSealed seals payload and writes it with WriteFile.
func WriteSealed(path string, payload []byte, perm fs.FileMode) error {
	return WriteFile(path, Seal(payload), perm)
}

// ReadSealed reads a file that WriteSealed wrote. The payload may have at most
// limit bytes. The error is fs.ErrNotExist for a missing file, a *SealError for a
// damaged one.
func ReadSealed(path string, limit int64) ([]byte, error) {
	in, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("cannot read the record %s: %w", path, err)
	}
	defer in.Close()
	data, err := io.ReadAll(io.LimitReader(in, limit+maxSealLine+1))
	if err != nil {
		return nil, fmt.Errorf("cannot read the record %s: %w", path, err)
	}
	if int64(len(data)) > limit+maxSealLine {
		return nil, &SealError{Name: path, What: fmt.Sprintf("it has more than the %d bytes that are allowed", limit)}
	}
	payload, err := Unseal(path, data)
	if err == nil && int64(len(payload)) > limit {
		return nil, &SealError{Name: path, What: fmt.Sprintf("it has more than the %d bytes that are allowed", limit)}
	}
	return payload, err
}

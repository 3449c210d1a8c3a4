// Package bundle carries lull's helper programs (lull-shim, lull-harness) inside
// the lull binary, so that installing one file is enough.
//
// A binary built with the tag bundle, as make build does, contains each helper
// compressed, with its checksum. A binary built without the tag contains none.
// Unpack never returns a file that differs from what was built. The caller
// decides whether to use another program, beside lull or named by a flag.
package bundle

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// maxProgram bounds an unpacked helper, in bytes.
const maxProgram = 64 << 20

// Has reports whether this binary contains the helper.
func Has(name string) bool {
	_, err := fs.Stat(files, name+".gz")
	return err == nil
}

// Unpack returns the path of the helper below dir, which it creates if needed. It
// writes the file at first use, and replaces it if it differs from the helper in
// this binary, as after an upgrade. The replacement is atomic, and a process that
// runs the old file is not affected. If the binary does not contain the helper,
// the error is fs.ErrNotExist.
func Unpack(dir, name string) (path string, err error) { return unpack(files, dir, name) }

func unpack(from fs.FS, dir, name string) (path string, err error) {
	defer func() {
		if err != nil {
			path, err = "", fmt.Errorf("cannot unpack %s: %w", name, err)
		}
	}()
	packed, err := fs.ReadFile(from, name+".gz")
	if err != nil {
		return "", err
	}
	line, err := fs.ReadFile(from, name+".sha256")
	if err != nil {
		return "", err
	}
	want, _, _ := strings.Cut(strings.TrimSpace(string(line)), " ")
	path = filepath.Join(dir, name)
	if sum, err := sumFile(path); err == nil && sum == want {
		return path, os.Chmod(path, 0o755)
	}
	program, err := decompress(packed)
	if err != nil {
		return "", err
	}
	if sum := sha256.Sum256(program); hex.EncodeToString(sum[:]) != want {
		return "", errors.New("the copy inside this binary is corrupt: build or download lull again")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	return path, replace(path, program)
}

// replace writes a program to a temporary file and renames it to path.
func replace(path string, program []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".lull-tmp-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(program)
	if err := errors.Join(err, f.Chmod(0o755), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

func decompress(packed []byte) ([]byte, error) {
	r, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, err
	}
	program, err := io.ReadAll(io.LimitReader(r, maxProgram+1))
	if err == nil && len(program) > maxProgram {
		err = fmt.Errorf("it has more than %d bytes", maxProgram)
	}
	return program, err
}

// sumFile returns the SHA-256 of a file in hexadecimal.
func sumFile(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, io.LimitReader(f, maxProgram+1)); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

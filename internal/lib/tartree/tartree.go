// Package tartree copies files and directory trees as tar streams. It never
// accesses files outside the given os.Root, whatever links the tree or the stream
// contains.
package tartree

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// ErrIrregular means that a path is neither a file nor a directory.
var ErrIrregular = errors.New("it is not a file or directory")

// Pack writes the tree below root to w, with as as the name of its top directory.
// Sockets, devices and pipes are omitted.
func Pack(w io.Writer, root *os.Root, as string) error {
	t := tar.NewWriter(w)
	err := fs.WalkDir(root.FS(), ".", func(name string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := root.Lstat(name)
		if err != nil {
			return err
		}
		link := ""
		switch {
		case st.Mode()&fs.ModeSymlink != 0:
			if link, err = root.Readlink(name); err != nil {
				return err
			}
		case !st.IsDir() && !st.Mode().IsRegular():
			return nil
		}
		if !st.Mode().IsRegular() {
			return add(t, st, path.Join(as, name), link, nil)
		}
		f, err := root.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		return add(t, st, path.Join(as, name), "", f)
	})
	if err != nil {
		return fmt.Errorf("pack %s: %w", as, err)
	}
	return t.Close()
}

// PackFile writes one regular file to w, under the name as.
func PackFile(w io.Writer, f *os.File, as string) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("pack %s: %w", as, ErrIrregular)
	}
	t := tar.NewWriter(w)
	if err := add(t, st, as, "", f); err != nil {
		return fmt.Errorf("pack %s: %w", as, err)
	}
	return t.Close()
}

// Rename copies a stream that Pack wrote, and replaces its topmost name by as.
func Rename(w io.Writer, r io.Reader, as string) error {
	in, out := tar.NewReader(r), tar.NewWriter(w)
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return out.Close()
		}
		if err != nil {
			return fmt.Errorf("read the archive: %w", err)
		}
		_, rest, _ := strings.Cut(path.Clean(h.Name), "/")
		if h.Name = path.Join(as, rest); h.Typeflag == tar.TypeDir {
			h.Name += "/"
		}
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		if _, err := io.Copy(out, in); err != nil {
			return err
		}
	}
}

// add writes one entry. If the file grows in the meantime, only the size that was
// announced is written.
func add(t *tar.Writer, st fs.FileInfo, name, link string, content io.Reader) error {
	h, err := tar.FileInfoHeader(st, link)
	if err != nil {
		return err
	}
	h.Name, h.Format = name, tar.FormatPAX
	if st.IsDir() {
		h.Name += "/"
	}
	if err := t.WriteHeader(h); err != nil || content == nil {
		return err
	}
	_, err = io.CopyN(t, content, h.Size)
	return err
}

// Unpack unpacks a stream that Pack wrote below root. If as is not empty, it
// replaces the stream's topmost name. own, unless nil, is called for each new
// entry. Existing files are replaced.
func Unpack(r io.Reader, root *os.Root, as string, own func(name string) error) error {
	t := tar.NewReader(r)
	for n := 0; ; n++ {
		h, err := t.Next()
		if errors.Is(err, io.EOF) && n > 0 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the archive: %w", err)
		}
		name := path.Clean(h.Name)
		if as != "" {
			_, rest, _ := strings.Cut(name, "/")
			name = path.Join(as, rest)
		}
		if !filepath.IsLocal(name) {
			return fmt.Errorf("read the archive: %q leaves the target directory", h.Name)
		}
		if err := unpack(t, root, name, h); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
		if own != nil {
			if err := own(name); err != nil {
				return fmt.Errorf("write %s: %w", name, err)
			}
		}
	}
}

func unpack(t *tar.Reader, root *os.Root, name string, h *tar.Header) error {
	mode := h.FileInfo().Mode().Perm()
	switch h.Typeflag {
	case tar.TypeDir:
		return root.MkdirAll(name, mode|0o700)
	case tar.TypeSymlink:
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return root.Symlink(h.Linkname, name)
	case tar.TypeReg:
	default:
		return fmt.Errorf("it is not a file, directory or link")
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, t)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return root.Chtimes(name, h.ModTime, h.ModTime)
}

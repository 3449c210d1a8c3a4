// Package tartree copies files and directory trees as tar streams. It stays below
// the os.Root that it is given, whatever links the tree or the stream contains.
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

// ErrIrregular is the error for anything but files and directories.
var ErrIrregular = errors.New("it is not a file or directory")

// Pack writes the tree below root to w; its top directory is called as. Sockets,
// devices and pipes are left out.
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

// PackFile writes one regular file to w, called as.
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

// Rename copies a stream of Pack, in which the topmost name becomes as.
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

// add writes one entry. A file that grows meanwhile is cut at its size.
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

// Unpack reads a stream of Pack into root. If as is not empty, the topmost name of
// the stream becomes as. own is called for each new entry; nil does nothing.
// Existing files are replaced.
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

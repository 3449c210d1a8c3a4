package oci

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Limits bound the unpacked size of an image. Zero values mean the defaults.
type Limits struct {
	Bytes  int64 // of all files together, default 32 GiB
	Files  int   // entries of all layers together, default 2,000,000
	Layers int   // default 256
}

func (l Limits) withDefaults() Limits {
	if l.Bytes == 0 {
		l.Bytes = 32 << 30
	}
	if l.Files == 0 {
		l.Files = 2_000_000
	}
	if l.Layers == 0 {
		l.Layers = 256
	}
	return l
}

const (
	maxPath = 4096 // bytes of a name, as in the kernel
	maxPart = 255

	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
)

// unpacker applies layers to one directory.
type unpacker struct {
	root  *os.Root
	left  Limits
	owner bool // restore owners and all mode bits; requires root
	flat  bool // extract only files and directories, to be read by name

	fresh map[string]bool // paths created by the current layer; its opaque whiteouts do not affect them
	// last and lastAt cache the parent that was resolved last, because the
	// entries of a directory are adjacent. They are reset whenever a link or
	// removal could change the result.
	last, lastAt string
}

func newUnpacker(root *os.Root, l Limits) *unpacker {
	return &unpacker{root: root, left: l.withDefaults(), owner: os.Geteuid() == 0}
}

// layer applies one uncompressed layer. want is its diff_id (sha256:hex), empty
// if unknown.
func (u *unpacker) layer(r io.Reader, want string) error {
	if u.left.Layers--; u.left.Layers < 0 {
		return errors.New("it has too many layers")
	}
	u.fresh, u.last = map[string]bool{}, ""
	sum := sha256.New()
	// Names and padding add to the file content; the limit on entries bounds
	// their total.
	in := &bounded{r: io.TeeReader(r, sum), left: satAdd(u.left.Bytes, int64(u.left.Files)*4096+1<<20)}
	t := tar.NewReader(in)
	for {
		h, err := t.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if u.left.Files--; u.left.Files < 0 {
			return errors.New("it has too many files")
		}
		if err := u.entry(h, t); err != nil {
			return fmt.Errorf("entry %.200q: %w", h.Name, err)
		}
	}
	if _, err := io.Copy(io.Discard, in); err != nil {
		return err
	}
	if got := "sha256:" + hex.EncodeToString(sum.Sum(nil)); want != "" && got != want {
		return fmt.Errorf("digest mismatch: got %s, want %s", got, want)
	}
	return nil
}

func satAdd(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// bounded is a reader that returns an error at its limit, where io.LimitedReader
// returns EOF.
type bounded struct {
	r    io.Reader
	left int64
}

var errTooBig = errors.New("it is larger than allowed")

func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, errTooBig
	}
	return n, err
}

func checkName(name string) (string, error) {
	if len(name) > maxPath || strings.ContainsRune(name, 0) {
		return "", errors.New("the name is too long or holds a NUL byte")
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." || len(part) > maxPart {
			return "", errors.New("the name leaves its directory, or a part of it is too long")
		}
	}
	return path.Clean("/" + name)[1:], nil
}

// entry applies one entry of a layer.
func (u *unpacker) entry(h *tar.Header, body io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, err := checkName(h.Name)
	if err != nil {
		return err
	}
	if name == "" { // the root itself
		return u.chmod(".", h)
	}
	dir, base := path.Split(name)
	parent, err := u.parent(dir)
	if err != nil {
		return err
	}
	if strings.HasPrefix(base, whiteout) {
		return u.whiteout(parent, base)
	}
	if u.flat && h.Typeflag != tar.TypeDir && h.Typeflag != tar.TypeReg {
		return errors.New("it is neither a file nor a directory")
	}
	at := path.Join(parent, base)
	if err := u.clear(at, h.Typeflag == tar.TypeDir); err != nil {
		return err
	}
	u.fresh[at] = true
	switch h.Typeflag {
	case tar.TypeDir:
		if err := u.root.Mkdir(at, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		return u.file(at, h, body)
	case tar.TypeSymlink:
		if len(h.Linkname) > maxPath || h.Linkname == "" || strings.ContainsRune(h.Linkname, 0) {
			return errors.New("the link's target is empty or too long")
		}
		if err := u.root.Symlink(h.Linkname, at); err != nil {
			return err
		}
		return u.chown(at, h)
	case tar.TypeLink:
		return u.link(at, h)
	case tar.TypeFifo:
		if err := u.fifo(parent, base); err != nil {
			return err
		}
	case tar.TypeChar, tar.TypeBlock:
		delete(u.fresh, at)
		return nil
	default:
		return fmt.Errorf("unknown entry type %q", h.Typeflag)
	}
	if err := u.chown(at, h); err != nil {
		return err
	}
	return u.chmod(at, h)
}

// parent returns the directory of an entry with all links resolved, creating it
// if missing.
func (u *unpacker) parent(dir string) (string, error) {
	if dir == "" {
		return ".", nil
	}
	if dir == u.last {
		return u.lastAt, nil
	}
	at, err := resolve(u.root, dir)
	if err != nil {
		return "", err
	}
	if err := u.root.MkdirAll(at, 0o755); err != nil {
		return "", err
	}
	u.last, u.lastAt = dir, at
	return at, nil
}

// whiteout removes from the directory parent what lower layers created and the
// whiteout entry base names.
func (u *unpacker) whiteout(parent, base string) error {
	u.last = ""
	if base == opaque {
		d, err := u.root.Open(parent)
		if err != nil {
			return err
		}
		names, err := d.Readdirnames(-1)
		if err = errors.Join(err, d.Close()); err != nil {
			return err
		}
		for _, n := range names {
			if at := path.Join(parent, n); !u.fresh[at] {
				if err := u.root.RemoveAll(at); err != nil {
					return err
				}
			}
		}
		return nil
	}
	name := strings.TrimPrefix(base, whiteout)
	if strings.HasPrefix(name, whiteout) {
		return nil // bookkeeping of old storage drivers
	}
	if name == "" || name == "." || name == ".." {
		return errors.New("a whiteout of nothing")
	}
	return u.root.RemoveAll(path.Join(parent, name))
}

// clear removes the file that an entry replaces. A directory that is replaced by
// a directory is kept with its content.
func (u *unpacker) clear(at string, dir bool) error {
	st, err := u.root.Lstat(at)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if dir && st.IsDir() {
		return nil
	}
	u.last = ""
	return u.root.RemoveAll(at)
}

func (u *unpacker) file(at string, h *tar.Header, body io.Reader) (err error) {
	if h.Size < 0 || h.Size > u.left.Bytes {
		return errTooBig
	}
	u.left.Bytes -= h.Size
	f, err := u.root.OpenFile(at, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := io.CopyN(f, body, h.Size); err != nil {
		return err
	}
	if err := u.chown(at, h); err != nil {
		return err
	}
	if err := u.chmod(at, h); err != nil {
		return err
	}
	// Only file capabilities matter to a container; other attributes could affect
	// file systems mounted on top.
	if v := h.PAXRecords["SCHILY.xattr.security.capability"]; v != "" && u.owner {
		if err := unix.Fsetxattr(int(f.Fd()), "security.capability", []byte(v), 0); err != nil && err != unix.EOPNOTSUPP {
			return fmt.Errorf("cannot set its capabilities: %w", err)
		}
	}
	return u.root.Chtimes(at, time.Time{}, sane(h.ModTime))
}

// sane clamps times to what file systems can store.
func sane(t time.Time) time.Time {
	if t.Unix() < 0 || t.Unix() > math.MaxInt32*2 {
		return time.Unix(0, 0)
	}
	return t
}

func (u *unpacker) link(at string, h *tar.Header) error {
	name, err := checkName(h.Linkname)
	if err != nil || name == "" {
		return errors.Join(errors.New("cannot link to it"), err)
	}
	dir, base := path.Split(name)
	parent, err := resolve(u.root, dir)
	if err != nil {
		return err
	}
	to := path.Join(parent, base)
	st, err := u.root.Lstat(to)
	if err != nil {
		return err
	}
	if st.IsDir() {
		return errors.New("it links to a directory")
	}
	return u.root.Link(to, at)
}

func (u *unpacker) fifo(parent, base string) error {
	d, err := u.root.Open(parent)
	if err != nil {
		return err
	}
	return errors.Join(unix.Mkfifoat(int(d.Fd()), base, 0o600), d.Close())
}

func (u *unpacker) chown(at string, h *tar.Header) error {
	if !u.owner {
		return nil
	}
	if h.Uid < 0 || h.Gid < 0 || int64(h.Uid) >= math.MaxUint32 || int64(h.Gid) >= math.MaxUint32 {
		return fmt.Errorf("owner %d:%d is out of range", h.Uid, h.Gid)
	}
	return u.root.Lchown(at, h.Uid, h.Gid)
}

func (u *unpacker) chmod(at string, h *tar.Header) error {
	mode := h.FileInfo().Mode()
	keep := mode & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky)
	if !u.owner {
		keep &= fs.ModePerm
		if h.Typeflag == tar.TypeDir {
			keep |= 0o700 // needed to unpack into it
		}
	}
	return u.root.Chmod(at, keep)
}

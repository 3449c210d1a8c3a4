package oci

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

// Image is an unpacked image.
type Image struct {
	Root   string // root file system directory; shared, never written
	Config Config
	Key    string // key in the store; empty for a directory used in place
}

// Store keeps unpacked images in a directory owned by one daemon. It is safe for
// concurrent use; images are unpacked one at a time.
type Store struct {
	Dir    string // created with mode 0700
	Limits Limits
	Stall  time.Duration // maximum silence of a registry; OpenStore sets a minute

	using sync.RWMutex  // read-held while an image is taken into use
	busy  chan struct{} // holds one element while an image is unpacked
}

// OpenStore opens the store in dir, creating the directory if needed, and removes
// what a crash left behind.
func OpenStore(dir string, l Limits) (*Store, error) {
	if err := os.MkdirAll(filepath.Join(dir, "images"), 0o700); err != nil {
		return nil, fmt.Errorf("cannot create the image store: %w", err)
	}
	left, err := filepath.Glob(filepath.Join(dir, "new-*"))
	for _, p := range left {
		err = errors.Join(err, os.RemoveAll(p))
	}
	if err != nil {
		return nil, fmt.Errorf("cannot remove leftovers from the image store: %w", err)
	}
	return &Store{Dir: dir, Limits: l, Stall: time.Minute, busy: make(chan struct{}, 1)}, nil
}

// Get returns the image that ref names, fetching or unpacking it if needed. A
// directory is used in place. A file or layout is identified by path, size and
// modification time, so that a changed one is unpacked again. A reference without
// a digest stays bound to the image that was fetched first.
func (s *Store) Get(ctx context.Context, ref string) (Image, error) {
	img, err := s.get(ctx, ref)
	if err != nil {
		return Image{}, fmt.Errorf("cannot use image %.300s: %w", ref, err)
	}
	return img, nil
}

func (s *Store) get(ctx context.Context, ref string) (Image, error) {
	if !filepath.IsAbs(ref) {
		return s.fetch(ctx, ref, keyOf("registry", ref), func(dir string) (Config, error) {
			img, err := fromRegistry(ctx, ref, s.Stall)
			if err != nil {
				return Config{}, err
			}
			return s.unpackImage(img, dir)
		})
	}
	k, err := kindOf(ref)
	if err != nil {
		return Image{}, err
	}
	if k == rootDir {
		return Image{Root: ref}, nil
	}
	mark := ref
	if k == layoutDir {
		mark = filepath.Join(ref, "index.json")
	}
	st, err := os.Stat(mark)
	if err != nil {
		return Image{}, err
	}
	ino := uint64(0)
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		ino = sys.Ino
	}
	key := keyOf(string(k), ref, fmt.Sprint(st.Size(), st.ModTime().UnixNano(), ino))
	return s.fetch(ctx, ref, key, func(dir string) (Config, error) {
		switch k {
		case rootTar:
			return Config{}, s.unpackRoot(ref, dir, false)
		case layoutTar:
			return s.unpackLayoutTar(ref, dir)
		case layoutDir:
			img, err := fromLayout(ref)
			if err != nil {
				return Config{}, err
			}
			return s.unpackImage(img, dir)
		default:
			img, err := fromSaved(ref)
			if err != nil {
				return Config{}, err
			}
			return s.unpackImage(img, dir)
		}
	})
}

func keyOf(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return hex.EncodeToString(sum[:16])
}

// fetch returns the image with the given key. If it is missing, fetch lets unpack
// create it in a temporary directory, which is then renamed into place.
func (s *Store) fetch(ctx context.Context, ref, key string, unpack func(dir string) (Config, error)) (Image, error) {
	home := filepath.Join(s.Dir, "images", key)
	if img, err := load(home); err == nil {
		return img, touch(home)
	}
	select {
	case s.busy <- struct{}{}:
		defer func() { <-s.busy }()
	case <-ctx.Done():
		return Image{}, context.Cause(ctx)
	}
	img, err := load(home)
	if err == nil {
		return img, nil // created concurrently
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return Image{}, fmt.Errorf("image cache entry %s is corrupt (delete it to re-fetch): %w", home, err)
	}
	tmp, err := os.MkdirTemp(s.Dir, "new-")
	if err != nil {
		return Image{}, err
	}
	defer os.RemoveAll(tmp) // a no-op after the rename
	if err := os.Mkdir(filepath.Join(tmp, "rootfs"), 0o755); err != nil {
		return Image{}, err
	}
	c, err := unpack(filepath.Join(tmp, "rootfs"))
	if err != nil {
		return Image{}, err
	}
	if err := save(tmp, c, ref); err != nil {
		return Image{}, err
	}
	if err := os.Rename(tmp, home); err != nil {
		return Image{}, err
	}
	return load(home)
}

// touch sets the modification time of an image's directory to now, to record that
// the image is taken into use. The modification time of its config file remains
// the time of its creation.
func touch(home string) error {
	now := time.Now()
	if err := os.Chtimes(home, now, now); err != nil {
		return fmt.Errorf("cannot record its use: %w", err)
	}
	return nil
}

func load(home string) (Image, error) {
	c, err := readConfig(filepath.Join(home, "config.json"))
	return Image{Root: filepath.Join(home, "rootfs"), Config: c, Key: filepath.Base(home)}, err
}

// save writes the config and makes everything below dir durable.
func save(dir string, c Config, ref string) error {
	b, err := json.Marshal(struct {
		Config
		Ref string `json:"ref"` // for display
	}{c, ref})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(d.Fd())), d.Close())
}

// within opens a directory as an os.Root, calls f and closes it.
func within(dir string, f func(r *os.Root) error) error {
	r, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	return errors.Join(f(r), r.Close())
}

func (s *Store) unpackRoot(path, dir string, flat bool) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	r, err := plain(f)
	if err != nil {
		return err
	}
	// A tar reader skips content of a seekable file without reading it, which
	// would bypass the digest and the limits.
	return within(dir, func(root *os.Root) error {
		u := newUnpacker(root, s.Limits)
		u.flat = flat
		return u.layer(onlyReader{r}, "")
	})
}

type onlyReader struct{ io.Reader }

func (s *Store) unpackImage(img v1.Image, dir string) (Config, error) {
	cf, err := img.ConfigFile()
	if err != nil {
		return Config{}, err
	}
	layers, err := img.Layers()
	if err != nil {
		return Config{}, err
	}
	if len(layers) != len(cf.RootFS.DiffIDs) {
		return Config{}, fmt.Errorf("it has %d layers, but its configuration lists %d", len(layers), len(cf.RootFS.DiffIDs))
	}
	err = within(dir, func(root *os.Root) error {
		u := newUnpacker(root, s.Limits)
		for n, l := range layers {
			r, err := l.Uncompressed()
			if err == nil {
				err = errors.Join(u.layer(r, cf.RootFS.DiffIDs[n].String()), r.Close())
			}
			if err != nil {
				return fmt.Errorf("layer %d: %w", n+1, err)
			}
		}
		return nil
	})
	return configOf(cf), err
}

// unpackLayoutTar unpacks an image from a tar of an OCI layout. It extracts the
// layout first, because its blobs may be in any order.
func (s *Store) unpackLayoutTar(path, dir string) (Config, error) {
	tmp, err := os.MkdirTemp(s.Dir, "new-")
	if err != nil {
		return Config{}, err
	}
	defer os.RemoveAll(tmp)
	if err := s.unpackRoot(path, tmp, true); err != nil {
		return Config{}, err
	}
	img, err := fromLayout(tmp)
	if err != nil {
		return Config{}, err
	}
	return s.unpackImage(img, dir)
}

package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"lull/internal/core/instance"
)

// users returns the directory that records the image of each instance.
func (s *Store) users() string { return filepath.Join(s.Dir, "users") }

// Use returns the image that ref names and keeps it from being removed until
// Release of id. That holds even while the instance is stopped, because its
// changes depend on the image.
func (s *Store) Use(ctx context.Context, ref, id string) (Image, error) {
	s.using.RLock()
	defer s.using.RUnlock()
	img, err := s.Get(ctx, ref)
	if err != nil || img.Key == "" {
		return img, err
	}
	err = errors.Join(os.MkdirAll(s.users(), 0o700), os.WriteFile(filepath.Join(s.users(), id), []byte(img.Key), 0o600))
	if err != nil {
		return Image{}, fmt.Errorf("cannot record that image %.300s is in use: %w", ref, err)
	}
	return img, nil
}

// Release drops an instance's use of its image.
func (s *Store) Release(id string) error {
	if err := os.Remove(filepath.Join(s.users(), id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("cannot record that an image is no longer in use: %w", err)
	}
	return nil
}

// used returns the images in use, by key.
func (s *Store) used() (map[string]bool, error) {
	out := map[string]bool{}
	ents, err := os.ReadDir(s.users())
	if errors.Is(err, fs.ErrNotExist) {
		return out, nil
	}
	for _, e := range ents {
		b, rerr := os.ReadFile(filepath.Join(s.users(), e.Name()))
		if rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
		out[string(b)] = true
	}
	return out, err
}

// Images implements instance.ImageKeeper.
func (s *Store) Images(context.Context) ([]instance.Image, error) {
	ents, err := os.ReadDir(filepath.Join(s.Dir, "images"))
	if err != nil {
		return nil, fmt.Errorf("cannot list images: %w", err)
	}
	used, err := s.used()
	if err != nil {
		return nil, fmt.Errorf("cannot determine which images are in use: %w", err)
	}
	var out []instance.Image
	for _, e := range ents {
		home := filepath.Join(s.Dir, "images", e.Name())
		i := instance.Image{ID: e.Name(), Kind: "unpacked", InUse: used[e.Name()]}
		if b, err := os.ReadFile(filepath.Join(home, "config.json")); err == nil {
			var c struct{ Ref string }
			if json.Unmarshal(b, &c) == nil {
				i.Source = c.Ref
			}
		}
		if i.UsedAt, i.Bytes, err = DiskUse(home); err != nil {
			return nil, fmt.Errorf("cannot measure an image: %w", err)
		}
		i.MadeAt = i.UsedAt
		if st, err := os.Stat(filepath.Join(home, "config.json")); err == nil {
			i.MadeAt = st.ModTime()
		}
		out = append(out, i)
	}
	return out, nil
}

// RemoveImage implements instance.ImageKeeper. It returns an error instead of
// waiting if an image is being fetched or taken into use.
func (s *Store) RemoveImage(_ context.Context, id string) error {
	if !s.using.TryLock() {
		return fmt.Errorf("cannot remove image %s: an image is being fetched or is about to be used", id)
	}
	defer s.using.Unlock()
	used, err := s.used()
	if err == nil && used[id] {
		err = errors.New("it is in use")
	}
	if err == nil && (id == "" || id != filepath.Base(id) || id[0] == '.') {
		err = errors.New("invalid image ID")
	}
	if err != nil {
		return fmt.Errorf("cannot remove image %s: %w", id, err)
	}
	// The first step is an atomic rename, so that a partly deleted image is never
	// used.
	gone, err := os.MkdirTemp(s.Dir, "new-")
	if err != nil {
		return fmt.Errorf("cannot remove image %s: %w", id, err)
	}
	if err := os.Rename(filepath.Join(s.Dir, "images", id), filepath.Join(gone, id)); err != nil {
		return errors.Join(fmt.Errorf("cannot remove image %s: %w", id, err), os.Remove(gone))
	}
	return os.RemoveAll(gone)
}

// DiskUse returns the disk usage of a file or tree in bytes, and when its root
// was last changed.
func DiskUse(top string) (changed time.Time, n int64, err error) {
	err = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		if path == top {
			changed = st.ModTime()
		}
		if sys, ok := st.Sys().(*syscall.Stat_t); ok {
			n += sys.Blocks * 512
		}
		return nil
	})
	return changed, n, err
}

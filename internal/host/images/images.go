// Package images lists and removes the cached images of a host.
package images

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
)

// Caches holds the image caches of a host. Its fields must be set before use.
type Caches struct {
	Keepers map[string]instance.ImageKeeper // by name
	// UsersOf returns the names of the instances that were made from an image or
	// whose files are in it, in any state.
	UsersOf func(instance.Image) []string
	MaxAge  time.Duration // an image not used for this long is removed; 0 means never
	MaxSize int64         // if the images have more bytes, unused ones are removed; 0 means no limit
	Halted  func() bool   // reports whether automatic actions are halted; then nothing is removed
	Log     *slog.Logger
}

// List returns the cached images, the largest first.
func (c *Caches) List(ctx context.Context) ([]hostctl.Image, error) {
	out := []hostctl.Image{}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(c.Keepers)) {
		list, err := c.Keepers[name].Images(ctx)
		errs = append(errs, err)
		for _, i := range list {
			out = append(out, hostctl.Image{Image: i, Keeper: name, UsedBy: c.UsersOf(i)})
		}
	}
	slices.SortStableFunc(out, func(a, b hostctl.Image) int { return int(min(max(b.Bytes-a.Bytes, -1), 1)) })
	return out, errors.Join(errs...)
}

// Prune removes images that are not in use and were last used before the given
// time. With a zero time it removes every unused image, and also files of guests
// that belong to no instance. The latter are removed only on request, because they
// could belong to an instance whose record is unreadable. removed lists what was
// removed, and err names what could not be.
func (c *Caches) Prune(ctx context.Context, before time.Time) (removed []hostctl.Image, err error) {
	list, err := c.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("cannot determine which images are in use: %w", err)
	}
	return c.remove(ctx, superfluous(list, before))
}

// remove removes the images of list that are still not in use.
func (c *Caches) remove(ctx context.Context, list []hostctl.Image) (removed []hostctl.Image, err error) {
	removed = []hostctl.Image{}
	for _, i := range list {
		if i.UsedBy = c.UsersOf(i.Image); len(i.UsedBy) > 0 { // an instance has been created meanwhile
			continue
		}
		if rerr := c.Keepers[i.Keeper].RemoveImage(ctx, i.ID); rerr != nil {
			err = errors.Join(err, rerr)
			continue
		}
		removed = append(removed, i)
	}
	if len(removed) > 0 {
		var names []string
		for _, i := range removed {
			names = append(names, i.ID)
		}
		c.Log.Info("images were removed", "images", strings.Join(names, " "))
	}
	return removed, err
}

// superfluous returns the images of list that are not in use and were last used
// before the given time.
func superfluous(list []hostctl.Image, before time.Time) (out []hostctl.Image) {
	for _, i := range list {
		if !i.InUse && len(i.UsedBy) == 0 && (before.IsZero() || i.Kind != "guest" && lastUse(i).Before(before)) {
			out = append(out, i)
		}
	}
	return out
}

func lastUse(i hostctl.Image) time.Time {
	if i.UsedAt.After(i.MadeAt) {
		return i.UsedAt
	}
	return i.MadeAt
}

// beyond returns which images to remove so that the rest of list has at most space
// bytes: those not in use, the least recently used first. Files of guests are
// neither removed nor counted.
func beyond(list []hostctl.Image, space int64) (out []hostctl.Image) {
	sum := int64(0)
	for _, i := range list {
		if i.Kind != "guest" {
			sum += i.Bytes
		}
	}
	old := slices.DeleteFunc(superfluous(list, time.Time{}), func(i hostctl.Image) bool { return i.Kind == "guest" })
	slices.SortStableFunc(old, func(a, b hostctl.Image) int { return lastUse(a).Compare(lastUse(b)) })
	for _, i := range old {
		if sum <= space {
			break
		}
		sum -= i.Bytes
		out = append(out, i)
	}
	return out
}

// fit removes images until the caches have at most MaxSize bytes.
func (c *Caches) fit(ctx context.Context) error {
	list, err := c.List(ctx)
	if err != nil {
		return fmt.Errorf("cannot determine which images are in use: %w", err)
	}
	_, err = c.remove(ctx, beyond(list, c.MaxSize))
	return err
}

// pruneEvery is the interval between searches for old images.
const pruneEvery = time.Hour

// Run removes images as MaxAge and MaxSize require, until ctx ends.
func (c *Caches) Run(ctx context.Context) {
	if c.MaxAge == 0 && c.MaxSize == 0 {
		return
	}
	t := time.NewTicker(pruneEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
		if c.Halted() {
			continue
		}
		var err error
		if c.MaxAge > 0 {
			_, err = c.Prune(ctx, time.Now().Add(-c.MaxAge))
		}
		if c.MaxSize > 0 {
			err = errors.Join(err, c.fit(ctx))
		}
		if err != nil {
			c.Log.Warn("some images could not be removed", "err", err)
		}
	}
}

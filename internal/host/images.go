package host

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
)

// Images lists the cached images, largest first.
func (h *Host) Images(ctx context.Context) ([]hostctl.Image, error) {
	out := []hostctl.Image{}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(h.cfg.Images)) {
		list, err := h.cfg.Images[name].Images(ctx)
		errs = append(errs, err)
		for _, i := range list {
			out = append(out, hostctl.Image{Image: i, Keeper: name, UsedBy: h.usersOf(i)})
		}
	}
	slices.SortStableFunc(out, func(a, b hostctl.Image) int { return int(min(max(b.Bytes-a.Bytes, -1), 1)) })
	return out, errors.Join(errs...)
}

// usersOf returns the names of the instances made from an image, in any state,
// and of the instance whose files it holds.
func (h *Host) usersOf(img instance.Image) []string {
	out := []string{}
	for _, i := range h.all() {
		if img.Source != "" && img.Source == i.spec().Image || img.ID == i.id {
			out = append(out, i.name())
		}
	}
	return out
}

// Prune removes images that are unused and were not used since before. A zero
// time removes every unused image, and also the files of guests that have no
// instance. Only then, because an unreadable record looks like a missing
// instance. removed lists what was deleted; err names what could not be.
func (h *Host) Prune(ctx context.Context, before time.Time) (removed []hostctl.Image, err error) {
	list, err := h.Images(ctx)
	if err != nil {
		return nil, fmt.Errorf("cannot tell what is in use: %w", err)
	}
	return h.removeImages(ctx, superfluous(list, before))
}

// removeImages removes the images of list that are still unused.
func (h *Host) removeImages(ctx context.Context, list []hostctl.Image) (removed []hostctl.Image, err error) {
	removed = []hostctl.Image{}
	for _, i := range list {
		if i.UsedBy = h.usersOf(i.Image); len(i.UsedBy) > 0 { // an instance was created since
			continue
		}
		if rerr := h.cfg.Images[i.Keeper].RemoveImage(ctx, i.ID); rerr != nil {
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
		h.log.Info("images were removed", "images", strings.Join(names, " "))
	}
	return removed, err
}

// superfluous returns the images of list that are unused and were not used
// since before.
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

// beyond returns the images to remove so that list takes at most space bytes:
// the least recently used among those not in use. Files of guests are never
// among them and do not count.
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

// fitImages removes images until the cache fits ImageSpace.
func (h *Host) fitImages(ctx context.Context) error {
	list, err := h.Images(ctx)
	if err != nil {
		return fmt.Errorf("cannot tell what is in use: %w", err)
	}
	_, err = h.removeImages(ctx, beyond(list, h.cfg.ImageSpace))
	return err
}

// pruneEvery is the interval between searches for old images.
const pruneEvery = time.Hour

// keepPruned removes images that exceed ImageAge or ImageSpace, until ctx ends.
func (h *Host) keepPruned(ctx context.Context) {
	if h.cfg.ImageAge == 0 && h.cfg.ImageSpace == 0 {
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
		if h.Halted() != nil {
			continue
		}
		var err error
		if h.cfg.ImageAge > 0 {
			_, err = h.Prune(ctx, time.Now().Add(-h.cfg.ImageAge))
		}
		if h.cfg.ImageSpace > 0 {
			err = errors.Join(err, h.fitImages(ctx))
		}
		if err != nil {
			h.log.Warn("some images could not be removed", "err", err)
		}
	}
}

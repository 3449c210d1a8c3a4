package host

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"lull/internal/instance"
	"lull/internal/link/hostctl"
)

// Images lists what is kept of images, by size, the largest first.
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

// usersOf names the instances that an image belongs to: those that were made of
// it, whatever state they are in, and the one whose files it is.
func (h *Host) usersOf(img instance.Image) []string {
	out := []string{}
	for _, i := range h.all() {
		if img.Source != "" && img.Source == i.spec().Image || img.ID == i.id {
			out = append(out, i.name())
		}
	}
	return out
}

// Prune removes the images that nobody uses, nor has used since a time;
// zero is any, and only then the files of guests that no instance is left of go
// too: a record that cannot be read looks like none. Removed is what went; an
// error names what could not.
func (h *Host) Prune(ctx context.Context, before time.Time) (removed []hostctl.Image, err error) {
	list, err := h.Images(ctx)
	if err != nil {
		return nil, fmt.Errorf("cannot tell what is in use: %w", err)
	}
	return h.removeImages(ctx, superfluous(list, before))
}

// removeImages removes images of which nobody has made an instance meanwhile.
func (h *Host) removeImages(ctx context.Context, list []hostctl.Image) (removed []hostctl.Image, err error) {
	removed = []hostctl.Image{}
	for _, i := range list {
		if i.UsedBy = h.usersOf(i.Image); len(i.UsedBy) > 0 { // made since
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

// superfluous are the images of list that nobody uses, nor has since before.
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

// beyond are the images that go so that all of list take no more than space: of
// those that nobody uses the ones that were not used for longest. Files of
// guests are none of them, and do not count.
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

// fitImages removes what is beyond ImageSpace.
func (h *Host) fitImages(ctx context.Context) error {
	list, err := h.Images(ctx)
	if err != nil {
		return fmt.Errorf("cannot tell what is in use: %w", err)
	}
	_, err = h.removeImages(ctx, beyond(list, h.cfg.ImageSpace))
	return err
}

// pruneEvery is how often old images are looked for.
const pruneEvery = time.Hour

// keepPruned removes images that nobody has used for as long as ImageAge says,
// and what is beyond ImageSpace, until ctx ends.
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
			h.log.Warn("some images could not be removed", "error", err)
		}
	}
}

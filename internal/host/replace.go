package host

import (
	"context"
	"errors"
	"fmt"

	"lull/internal/core/instance"
	"lull/internal/core/power"
)

// asideSuffix is appended to the name of an instance while its replacement starts.
// If the daemon is killed meanwhile, the instance remains, stopped, under that
// name.
const asideSuffix = ".before"

// Replace creates an instance with the name of an existing one and starts it. It
// first stops the existing one, because both may need the same ports, and removes
// it once the new one runs. If the new one fails, the existing one is restored with
// its files, and started again unless it was stopped before.
func (h *Host) Replace(ctx context.Context, s instance.Spec) (id string, err error) {
	old, err := h.find(s.Name)
	if err != nil {
		return "", err
	}
	if old.spec().Adopted != nil {
		return "", old.notOurs("replace")
	}
	aside := s.Name[:min(len(s.Name), instance.MaxName-len(asideSuffix))] + asideSuffix
	if _, err := h.checkNew(&s); err != nil { // must precede the stop
		return "", err
	}
	if err := h.nameIsFree(aside, "replace "+s.Name+" through"); err != nil {
		return "", err
	}
	old.mu.Lock()
	was := old.rec
	old.mu.Unlock()
	if err := h.Stop(ctx, old.id, ByManual, true); err != nil {
		return "", err
	}
	if err = old.setAside(ctx, aside); err == nil {
		if id, err = h.Create(ctx, s); err == nil {
			if err = h.Start(ctx, id, ByManual); err != nil {
				err = h.Discard(ctx, id, err)
			}
		}
	}
	refused, is := errors.AsType[*RefusedError](err)
	overtaken := is && refused.Overtaken // a user has stopped or removed the new instance
	if err == nil || overtaken {
		if derr := h.Delete(ctx, old.id, ByManual); derr != nil {
			err = errors.Join(err, fmt.Errorf("cannot remove the earlier %s, which is kept as %s: %w", s.Name, old.name(), derr))
		}
		return id, err
	}
	if berr := old.putBack(ctx, &was); berr != nil {
		return "", errors.Join(err, fmt.Errorf("cannot put the earlier %s back, which is kept as %s: %w", s.Name, old.name(), berr))
	}
	return "", fmt.Errorf("cannot replace %s, which is unchanged: %w", s.Name, err)
}

// setAside gives a stopped instance another name and closes its relay's ports, so
// that its replacement can have both.
func (i *inst) setAside(ctx context.Context, name string) error {
	if err := i.acquireCtx(ctx); err != nil {
		return err
	}
	defer i.release()
	if s := i.state(); s != power.Stopped {
		return &RefusedError{Name: i.name(), What: "replace", Reason: fmt.Sprintf("it is %s again", s)}
	}
	i.closeRelay()
	return i.rename(name)
}

// putBack undoes setAside, and starts i again unless it was stopped before.
func (i *inst) putBack(ctx context.Context, was *instance.Record) error {
	if err := i.acquireCtx(ctx); err != nil {
		return err
	}
	err := error(nil)
	if i.name() != was.Spec.Name {
		err = i.rename(was.Spec.Name)
	}
	if err == nil && i.gate == nil {
		err = i.openRelay()
	}
	if err == nil {
		i.note(func(r *instance.Record) {
			r.Enabled, r.StoppedBy, r.RestartAt = was.Enabled, was.StoppedBy, was.RestartAt
			if was.State == power.Stopped {
				r.StatusReason = was.StatusReason
			}
		})
		i.armRestart()
		i.rest()
	}
	i.release()
	if err != nil || was.State == power.Stopped {
		return err
	}
	return i.h.startFor(ctx, i, ByManual, "started again because its replacement failed")
}

package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
)

// adoptContainer makes an instance of a container whose labels do not request
// adoption. lull neither starts nor stops the container.
func (h *Host) adoptContainer(ctx context.Context, q hostctl.Adopt) (id string, err error) {
	refuse := func(format string, args ...any) error {
		return &RefusedError{Name: "container " + q.Container, What: "adopt", Reason: fmt.Sprintf(format, args...)}
	}
	rt, ok := h.cfg.Runtimes[instance.RuntimeDocker].(instance.ContainerAdopter)
	if !ok {
		return "", refuse("this host follows no containers: start it with lull host --docker")
	}
	h.adopting.Lock()
	defer h.adopting.Unlock()
	c, err := rt.Container(ctx, q.Container)
	if err != nil {
		return "", refuse("%v", err)
	}
	for _, image := range c.Images {
		if other, ok := h.ByImage(instance.RuntimeDocker, image); ok {
			return "", refuse("it already belongs to the instance %s", h.byIDNow(other).name())
		}
	}
	if c.Labelled {
		return "", refuse("lull already controls it because of its label; lull ps lists labels that cannot be used")
	}
	s := instance.Spec{Name: cmp.Or(q.Name, h.freeName(c.Name, 0)), Runtime: instance.RuntimeDocker, Image: c.Images[0], Restart: instance.RestartNo,
		PauseAfter: q.PauseAfter, StopAfter: cmp.Or(q.StopAfter, new(idle.Duration)),
		Probes: q.Probes, WakeSchedule: q.WakeSchedule}
	if id, err = h.Create(ctx, s); err != nil || !c.Running {
		return id, err
	}
	if err := h.StartedOutside(ctx, id, "adopted by "+requester(ctx)); err != nil {
		i := h.byIDNow(id)
		if i.acquireCtx(h.ctx) == nil {
			err = errors.Join(err, i.remove(h.ctx, ByManual, "it could not be adopted"))
			i.release()
		}
		return "", fmt.Errorf("cannot adopt the container %s: %w", q.Container, err)
	}
	return id, nil
}

// mayRelease returns an error if i cannot be released.
func (i *inst) mayRelease(ctx context.Context) error {
	refuse := func(why string) error { return &RefusedError{Name: i.name(), What: "release", Reason: why} }
	switch s := i.spec(); {
	case s.Adopted != nil:
		return nil
	case s.Runtime != instance.RuntimeDocker:
		return refuse("it was started by lull. Stop and remove it with: lull rm " + i.name())
	default:
		// A container that cannot be found now is adopted by its label when it is
		// seen again.
		if c, err := i.rt.(instance.ContainerAdopter).Container(ctx, s.Image); err == nil && c.Labelled {
			return refuse("its label puts it under lull's control. Create the container again without the label lull.pause-after")
		}
		return nil
	}
}

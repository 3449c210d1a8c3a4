package host

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/protocol/hostctl"
)

// Change replaces settings of an instance: its timers, and when it wakes and
// restarts. It works in any state and takes effect immediately. An invalid change
// changes nothing.
func (h *Host) Change(ctx context.Context, ref string, c hostctl.Change, by string) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	what := changed(c)
	if what == "" {
		return &InvalidError{errors.New("no change requested: name at least one setting")}
	}
	if err := i.acquireCtx(ctx); err != nil {
		return err
	}
	defer i.release()
	s := c.Apply(*i.spec())
	if err := h.checkWith(&s, i.rt); err != nil {
		return err
	}
	if err := s.CheckGrace(); err != nil && c.StopGrace != nil {
		return &InvalidError{err}
	}
	if s.Wakes() && c.WakeFromStopped != nil { // otherwise lull could not start it
		if err := checkOn(&s, i.rt); err != nil {
			return err
		}
	}
	if err := i.save(func(r *instance.Record) { r.Spec = s }); err != nil {
		return err
	}
	i.set.Store(&s)
	i.emit("changed", by, what)
	switch now := h.Now(); {
	case i.state() == power.Running:
		i.scheduleAwake(now)
	case i.state().Asleep():
		i.scheduleAsleep(now)
	case i.state() == power.Stopped:
		i.dropHeld()
		i.rest()
	}
	if _, holds := i.rt.(instance.PortHolder); !holds && !s.Adopted.IsUnit() && len(i.keptAddrs()) == 0 {
		i.letGo()
	}
	if s.Adopted.IsUnit() && s.Adopted.DropIn {
		if err := h.KeepDropIns(ctx); err != nil {
			return fmt.Errorf("%s is changed, but its unit is not: %w", i.name(), err)
		}
	}
	return nil
}

// changed returns the names, as in the API, of the fields that c changes.
func changed(c hostctl.Change) string {
	var names []string
	v := reflect.ValueOf(c)
	for n := range v.NumField() {
		if !v.Field(n).IsNil() {
			name, _, _ := strings.Cut(v.Type().Field(n).Tag.Get("json"), ",")
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

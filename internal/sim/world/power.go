package world

import (
	"fmt"
	"net/netip"
	"time"

	"lull/internal/sim/fault"
)

// Change is the state of one instance before and after a command.
type Change struct {
	ID            string
	Before, After State
}

func boots(i *Instance) fault.Call {
	return fault.Call{Service: "ec2", Action: "boot", Region: i.Region, Targets: []string{i.ID, i.Name}}
}

// Start starts stopped instances. It calls check before it changes anything.
func (w *World) Start(account, region string, ids []string, by string, check func() error) ([]Change, error) {
	asked := map[string]int{} // instances of a type that this command starts
	return w.command(account, region, ids, check, func(i *Instance, now Moment) error {
		switch i.State {
		case Pending, Running:
			return nil
		case Stopped:
		default:
			return incorrect(i, "started", "stopped")
		}
		w.advanceType(now, w.regions[regionKey{account, region}], i.Type)
		if !w.fits(i, asked[i.Type]) {
			return noCapacity(i.Type)
		}
		asked[i.Type]++
		return nil
	}, func(i *Instance, now Moment) {
		if i.State == Stopped {
			w.boot(now, i, by)
		}
	})
}

// StopOptions are the choices of StopInstances.
type StopOptions struct{ Hibernate, Force bool }

// Stop stops or hibernates running instances.
func (w *World) Stop(account, region string, ids []string, o StopOptions, by string, check func() error) ([]Change, error) {
	return w.command(account, region, ids, check, func(i *Instance, now Moment) error {
		return w.mayStop(i, now, o)
	}, func(i *Instance, now Moment) {
		if i.State == Running {
			w.stop(now, i, o.Hibernate, by)
		}
	})
}

func (w *World) mayStop(i *Instance, now Moment, o StopOptions) error {
	switch {
	case i.State == Stopped || i.State == Stopping:
		return nil
	case i.State != Running:
		return incorrect(i, "stopped", "running")
	case i.NoStop:
		return Refuse("OperationNotPermitted", "The instance '%s' may not be stopped. Modify its 'disableApiStop' instance attribute and try again.", i.ID)
	case i.InstanceStore:
		return Refuse("UnsupportedOperation", "The instance '%s' does not have an 'ebs' root device type and cannot be stopped.", i.ID)
	case i.Spot:
		return Refuse("UnsupportedOperation", "You can't stop the Spot Instance '%s' because it is associated with a one-time Spot Instance request.", i.ID)
	case o.Hibernate && !i.Hibernation:
		return Refuse("UnsupportedHibernationConfiguration", "The instance '%s' is not configured for hibernation.", i.ID)
	case o.Hibernate && now.World.Before(i.UpSince.Add(w.cfg.Timing.HibernateReady.D())):
		return Refuse("UnsupportedOperation", "The instance '%s' is not ready to hibernate yet; retry in a few minutes.", i.ID)
	}
	return nil
}

func (w *World) stop(now Moment, i *Instance, hibernate bool, by string) {
	i.become(now, Stopping, by)
	i.Reason = stopReason(now, by, hibernate)
	d := w.cfg.Timing.Stopping
	if hibernate {
		d = w.cfg.Timing.Hibernating
	}
	i.Hibernated = hibernate
	w.due(now, i, Stopped, w.jitter(i, d))
	if i.Host != nil {
		i.Host.powerOff(hibernate)
	}
}

// stopReason returns the reason for a stop in EC2's words.
func stopReason(now Moment, by string, hibernate bool) Reason {
	at := now.Wire.UTC().Format("2006-01-02 15:04:05 GMT")
	r := func(code, message, transition string) Reason {
		return Reason{Code: code, Message: code + ": " + message, Transition: fmt.Sprintf("%s (%s)", transition, at)}
	}
	switch by {
	case "server":
		return r("Server.ScheduledStop", "Stopped due to a scheduled retirement", "Server initiated")
	case "spot":
		return r("Server.SpotInstanceShutdown", "The instance was stopped because of a Spot interruption", "Server.SpotInstanceShutdown")
	case "instance":
		return r("Client.InstanceInitiatedShutdown", "Instance initiated shutdown", "")
	}
	if hibernate {
		return r("Client.UserInitiatedHibernate", "User initiated hibernate", "User initiated")
	}
	return r("Client.UserInitiatedShutdown", "User initiated shutdown", "User initiated")
}

// Terminate terminates instances.
func (w *World) Terminate(account, region string, ids []string, by string, check func() error) ([]Change, error) {
	return w.command(account, region, ids, check, func(i *Instance, _ Moment) error {
		if i.NoTerminate {
			return Refuse("OperationNotPermitted", "The instance '%s' may not be terminated. Modify its 'disableApiTermination' instance attribute and try again.", i.ID)
		}
		return nil
	}, func(i *Instance, now Moment) { w.terminate(now, i, by) })
}

func (w *World) terminate(now Moment, i *Instance, by string) {
	if i.State == ShuttingDown || i.State == Terminated {
		return
	}
	r := stopReason(now, by, false)
	if i.Host != nil {
		i.Host.powerOff(false)
	}
	i.become(now, ShuttingDown, by)
	i.Reason = r
	w.due(now, i, Terminated, w.jitter(i, w.cfg.Timing.ShuttingDown))
}

// Reboot restarts the machine's operating system. The instance stays running.
func (w *World) Reboot(account, region string, ids []string, check func() error) error {
	_, err := w.command(account, region, ids, check, func(i *Instance, _ Moment) error {
		if i.State != Running {
			return incorrect(i, "rebooted", "running")
		}
		return nil
	}, func(i *Instance, now Moment) {
		i.Boots++
		i.UpSince = now.World
		if i.Host != nil {
			i.Host.powerOff(false)
			i.Host.powerOn(now.World)
		}
	})
	return err
}

// command applies one change to all of the instances, or to none.
func (w *World) command(account, region string, ids []string, check func() error, may func(*Instance, Moment) error, do func(*Instance, Moment)) ([]Change, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.Clock.Now()
	if len(ids) == 0 {
		return nil, Refuse("MissingParameter", "The request must contain the parameter instancesSet")
	}
	list, err := w.pick(now, account, region, ids)
	if err != nil {
		return nil, err
	}
	for _, i := range list {
		if err := may(i, now); err != nil {
			return nil, err
		}
	}
	if err := check(); err != nil {
		return nil, err
	}
	out := make([]Change, 0, len(list))
	for _, i := range list {
		c := Change{ID: i.ID, Before: i.State}
		do(i, now)
		c.After = i.State
		out = append(out, c)
	}
	return out, nil
}

func incorrect(i *Instance, verb, from string) *Error {
	if i.State == Terminated || i.State == ShuttingDown {
		return Refuse("IncorrectInstanceState", "The instance '%s' is not in a state from which it can be %s.", i.ID, verb)
	}
	return Refuse("IncorrectInstanceState", "The instance '%s' is not in the '%s' state.", i.ID, from)
}

// External changes an instance's power by other means than the API. by is a user in
// the console ("user"), the cloud ("server", "spot") or the guest itself
// ("instance"). op is start, stop, hibernate or terminate.
func (w *World) External(ref, op, by string) error {
	w.mu.Lock()
	i := w.lookup(ref)
	w.mu.Unlock()
	if i == nil {
		return fmt.Errorf("cannot %s instance %q: there is none", op, ref)
	}
	free := func() error { return nil }
	var err error
	switch op {
	case "start":
		_, err = w.Start(i.Account, i.Region, []string{i.ID}, by, free)
	case "stop", "hibernate":
		if by == "instance" && i.OnShutdown == "terminate" {
			_, err = w.Terminate(i.Account, i.Region, []string{i.ID}, by, free)
			break
		}
		_, err = w.Stop(i.Account, i.Region, []string{i.ID}, StopOptions{Hibernate: op == "hibernate"}, by, free)
	case "terminate":
		_, err = w.Terminate(i.Account, i.Region, []string{i.ID}, by, free)
	default:
		return fmt.Errorf("cannot %s instance %q: the operations are start, stop, hibernate and terminate", op, ref)
	}
	return err
}

// advance advances one instance to now. It completes transitions that became due and
// performs, in order of time, what the scripted users of its host did in between.
func (w *World) advance(now Moment, i *Instance) {
	if i.purged {
		return
	}
	for {
		due := i.Due
		if i.Stuck {
			due = time.Time{}
		}
		user := time.Time{}
		if i.Host != nil {
			user = i.Host.nextUser()
		}
		switch {
		case !due.IsZero() && !due.After(now.World) && (user.IsZero() || !user.Before(due)):
			w.arrive(w.Clock.At(due), i)
		case !user.IsZero() && !user.After(now.World):
			w.stepUser(w.Clock.At(user), i)
		default:
			return
		}
	}
}

// arrive completes the transition that is in progress.
func (w *World) arrive(at Moment, i *Instance) {
	to := i.DueTo
	i.become(at, to, "time")
	switch to {
	case Running:
		i.UpSince = at.World
		if !i.Hibernated {
			i.Boots++
		}
		if i.Host != nil {
			i.Host.powerOn(at.World)
		}
		i.Hibernated = false
	case Stopped:
		w.release(i)
	case Terminated:
		w.release(i)
		delete(w.byPrivate, i.PrivateIP)
		i.PrivateIP = netip.Addr{}
		i.Gone = at.Wire.Add(scale(w.cfg.Timing.TerminatedVisible.D(), 1/w.Clock.Speed()))
	}
}

// release takes the public address away, as a stop does unless it is an Elastic IP.
func (w *World) release(i *Instance) {
	if i.Elastic && i.State != Terminated || !i.PublicIP.IsValid() {
		return
	}
	delete(w.byPublic, i.PublicIP)
	i.PublicIP = netip.Addr{}
}

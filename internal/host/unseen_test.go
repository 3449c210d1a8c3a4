package host

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/instance"
	"lull/internal/core/power"
)

// visits are connections that come and go between two samples. It counts how often
// their ends were found out, which is expensive.
type visits struct {
	mu    sync.Mutex
	ends  []time.Time
	other time.Time // when a connection of another program that counts as unseen ended last
	found time.Time // when they were last found out
	asked int
	err   error

	memory time.Duration // how long the ends are known; 0 means forever
}

func (v *visits) unseen() *instance.Unseen {
	v.mu.Lock()
	defer v.mu.Unlock()
	until := v.other
	for _, t := range v.ends {
		if t.After(until) {
			until = t
		}
	}
	if !until.After(v.found) {
		return nil
	}
	u := &instance.Unseen{Until: until, Newest: func(ignore func(time.Time) bool) (newest time.Time, err error) {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.asked++
		if v.err != nil {
			return newest, v.err
		}
		v.found = time.Now()
		for _, t := range v.ends {
			if t.After(newest) && !ignore(t) && (v.memory == 0 || time.Since(t) < v.memory) {
				newest = t
			}
		}
		return newest, nil
	}}
	if v.memory > 0 {
		first := until
		for _, t := range v.ends {
			if t.After(v.found) && t.Before(first) {
				first = t
			}
		}
		u.Forgotten = first.Add(v.memory)
	}
	return u
}

// come adds a connection that ends now.
func (v *visits) come() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.ends = append(v.ends, time.Now())
}

// unseenOfOthers is unseen while another program's connections come and go.
func (v *visits) unseenOfOthers() *instance.Unseen {
	v.mu.Lock()
	v.other = time.Now()
	v.mu.Unlock()
	return v.unseen()
}

// fail makes finding out the ends fail with err; nil makes it succeed again.
func (v *visits) fail(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.err = err
}

// count returns how often the ends were found out.
func (v *visits) count() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.asked
}

// TestUnseen checks that short connections keep the instance running and are shown,
// and that whose they are is found out only if nothing else prevents the pause.
func TestUnseen(t *testing.T) {
	inTuned(t, nil, func(r *rig) {
		v := &visits{}
		r.k.Unseen = v.unseen
		r.run("web", nil)
		began := time.Now()
		for range 30 { // one every 10 s
			time.Sleep(10 * time.Second)
			v.come()
		}
		last := time.Now()
		time.Sleep(6 * time.Second) // includes a probe
		r.is("web", power.Running)
		if o, err := r.Get("web"); err != nil || o.LastActivityAt == nil || o.LastActivityAt.Before(last) {
			t.Errorf("the last activity is %v, one client left at %v: %v", o.LastActivityAt, last, err)
		}
		if most := int(time.Since(began)/time.Minute) + 1; v.count() > most {
			t.Errorf("asked %d times, at most %d are needed", v.count(), most)
		}
		time.Sleep(time.Until(last.Add(time.Minute)) - time.Second)
		r.is("web", power.Running)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		r.is("web", power.Paused)
	})
}

// TestUnseenOfOthers checks that connections of other programs do not keep an
// instance running, however frequent they are.
func TestUnseenOfOthers(t *testing.T) {
	inTuned(t, nil, func(r *rig) {
		v := &visits{}
		r.k.Unseen = v.unseenOfOthers
		r.run("web", nil)
		time.Sleep(70 * time.Second)
		r.is("web", power.Paused)
		if v.count() != 1 {
			t.Errorf("asked %d times", v.count())
		}
	})
}

// TestUnseenUnknown checks that an instance is not paused while it is unknown
// whether it had a client.
func TestUnseenUnknown(t *testing.T) {
	inTuned(t, nil, func(r *rig) {
		v := &visits{err: errors.New("cannot list")}
		r.k.Unseen = v.unseenOfOthers
		r.run("web", nil)
		time.Sleep(10 * time.Minute)
		r.is("web", power.Running)
		v.fail(nil)
		time.Sleep(10 * time.Second)
		r.is("web", power.Paused)
	})
}

// TestUnseenForgotten checks that a short connection is found out before the kernel
// forgets it, even if that is long before the pause.
func TestUnseenForgotten(t *testing.T) {
	inTuned(t, func(c *Config) { c.PauseAfter = 5 * time.Minute }, func(r *rig) {
		v := &visits{memory: time.Minute}
		r.k.Unseen = v.unseen
		r.run("web", nil)
		time.Sleep(4 * time.Minute)
		v.come()
		time.Sleep(5*time.Minute - time.Second)
		r.is("web", power.Running)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		r.is("web", power.Paused)
	})
}

package world

import (
	"fmt"
	"sync"
	"time"
)

// Clock maps the time of clients to the time of the simulated world.
//
// Everything on the wire is in the client's time, that of the machine or bubble that
// this process runs in, so timestamps agree with the client's clock at any speed.
// Speed is how fast things happen: at speed 60 an instance boots in half a second and
// a user's working day takes eight minutes.
//
// A Clock starts no goroutine: the world's time is computed on access.
type Clock struct {
	mu     sync.Mutex
	base   time.Time // the world's time at anchor
	anchor time.Time // the client's time at which base was set
	speed  float64
}

// NewClock returns a clock whose world's time is start now; a zero start means the
// present.
func NewClock(start time.Time, speed float64) *Clock {
	now := time.Now()
	if start.IsZero() {
		start = now
	}
	if speed <= 0 {
		speed = 1
	}
	return &Clock{base: start, anchor: now, speed: speed}
}

// Moment is one instant in both times.
type Moment struct {
	World time.Time // determines users' schedules and transitions
	Wire  time.Time // what clients see
}

// Now returns the present.
func (c *Clock) Now() Moment {
	c.mu.Lock()
	defer c.mu.Unlock()
	wire := time.Now()
	return Moment{World: c.base.Add(scale(wire.Sub(c.anchor), c.speed)), Wire: wire.Round(0)}
}

// At returns the moment at which the world's time was, or will be, t.
func (c *Clock) At(t time.Time) Moment {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Moment{World: t, Wire: c.anchor.Add(scale(t.Sub(c.base), 1/c.speed)).Round(0)}
}

// AtWire returns the moment at which the client's time was, or will be, t.
func (c *Clock) AtWire(t time.Time) Moment {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Moment{World: c.base.Add(scale(t.Sub(c.anchor), c.speed)), Wire: t}
}

// Speed returns how many seconds of the world pass in one second of a client.
func (c *Clock) Speed() float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.speed
}

// setSpeed changes the speed from now on. World.SetSpeed first advances everything to
// now.
func (c *Clock) setSpeed(speed float64) error {
	if speed <= 0 || speed > 1e6 {
		return fmt.Errorf("cannot set clock speed: %v is outside 0 to 1e6", speed)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	c.base = c.base.Add(scale(now.Sub(c.anchor), c.speed))
	c.anchor, c.speed = now, speed
	return nil
}

// Advance moves the world's time forward by d at once, without the client's. Events
// that become due get client times within the last d/speed.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.base = c.base.Add(d)
}

// clockState is a Clock as saved. A restored world continues as if it had not been
// stopped.
type clockState struct {
	Base   time.Time `json:"base"`
	Anchor time.Time `json:"anchor"`
	Speed  float64   `json:"speed"`
}

func (c *Clock) save() clockState {
	c.mu.Lock()
	defer c.mu.Unlock()
	return clockState{Base: c.base.Round(0), Anchor: c.anchor.Round(0), Speed: c.speed}
}

func (c *Clock) restore(s clockState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.base, c.anchor, c.speed = s.Base, s.Anchor, s.Speed
}

func scale(d time.Duration, by float64) time.Duration {
	if by == 1 {
		return d
	}
	return time.Duration(float64(d) * by)
}

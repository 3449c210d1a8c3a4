package admit

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"lull/internal/core/power"
)

func drawAsks(t *rapid.T) []Ask {
	asks := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Ask {
		return Ask{Memory: rapid.Int64Range(0, 8).Draw(t, "memory"), Slow: rapid.Bool().Draw(t, "slow"), Client: rapid.Bool().Draw(t, "client")}
	}), 0, 8).Draw(t, "asks")
	for n := range asks {
		asks[n].Seq = uint64(n)
	}
	slices.SortFunc(asks, Order)
	return asks
}

// TestNextKeepsToTheRoom checks that neither memory nor places are granted twice,
// and that an ask is overtaken only by asks that do not wait for the same
// resource.
func TestNextKeepsToTheRoom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		asks := drawAsks(t)
		r := Capacity{Free: rapid.Int64Range(-4, 20).Draw(t, "free"), Places: rapid.IntRange(0, 4).Draw(t, "places")}
		granted, short := Next(r, asks)
		free, places := r.Free, r.Places
		for _, n := range granted {
			if free -= asks[n].Memory; asks[n].Memory > 0 && free < 0 {
				t.Fatalf("ask %d has memory that is not there", n)
			}
			if asks[n].Slow {
				places--
			}
		}
		if places < 0 {
			t.Fatal("more places were given than there are")
		}
		first := true // the first ask that has to wait for memory
		for n, a := range asks {
			if slices.Contains(granted, n) {
				continue
			}
			for _, later := range granted {
				b := asks[later]
				switch {
				case later < n:
				case a.Slow && b.Slow && a.Memory == 0:
					t.Fatalf("ask %d has the place that %d waits for", later, n)
				case short > 0 && !a.Slow && a.Memory > 0 && b.Memory > 0:
					t.Fatalf("ask %d has memory that %d waits for", later, n)
				}
			}
			if !a.Slow && a.Memory > 0 && first {
				first = false
				if short <= 0 {
					t.Fatalf("ask %d waits for memory, and nothing is short", n)
				}
			}
			if a.Memory == 0 && !a.Slow {
				t.Fatalf("ask %d waits and needs nothing", n)
			}
		}
		if n := len(granted); n < len(asks) && short == 0 && places > 0 {
			t.Fatalf("%d of %d may proceed although there is a place for more", n, len(asks))
		}
	})
}

// TestNobodyStarves checks that every ask is granted eventually, if each fits
// alone and what is granted is returned.
func TestNobodyStarves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		asks := drawAsks(t)
		r := Capacity{Free: 8, Places: 1}
		for round := 0; len(asks) > 0; round++ {
			granted, _ := Next(r, asks)
			if !slices.Contains(granted, 0) {
				t.Fatalf("the first of %d does not continue with everything free", len(asks))
			}
			slices.Reverse(granted)
			for _, n := range granted {
				asks = slices.Delete(asks, n, n+1)
			}
		}
	})
}

func drawSleepers(t *rapid.T) []Sleeper {
	states := []power.Instance{power.Running, power.Starting, power.Pausing, power.Paused, power.Reclaimed, power.Hibernated, power.Stopped, power.Stopping}
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Sleeper {
		return Sleeper{State: rapid.SampledFrom(states).Draw(t, "state"), Holds: rapid.Int64Range(0, 10).Draw(t, "holds"),
			Used:    time.Unix(rapid.Int64Range(0, 20).Draw(t, "used"), 0),
			Reclaim: rapid.Bool().Draw(t, "reclaim"), Hibernate: rapid.Bool().Draw(t, "hibernate")}
	}), 0, 8).Draw(t, "sleepers")
}

// TestPush checks that only sleeping instances are pushed, that cheap steps and
// long unused instances come first, that none is pushed if all together do not
// suffice, and that pushing ends.
func TestPush(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := drawSleepers(t)
		short := rapid.Int64Range(-1, 30).Draw(t, "short")
		for steps := 0; ; steps++ {
			n, to := Push(short, list)
			could := int64(0)
			for _, s := range list {
				if s.deeper() != "" {
					could += s.Holds
				}
			}
			if to == "" {
				if short > 0 && could >= short {
					t.Fatalf("none proceeds although %d bytes could be had for %d", could, short)
				}
				return
			}
			s := list[n]
			if short <= 0 || could < short {
				t.Fatalf("%v goes in vain: %d bytes short, %d to be had", s, short, could)
			}
			if power.InstanceTable.Check(s.State, to) != nil || !to.Asleep() || s.State != power.Paused && s.State != power.Reclaimed {
				t.Fatalf("%v goes to %s", s, to)
			}
			if to == power.Reclaimed && !s.Reclaim || to == power.Hibernated && !s.Hibernate {
				t.Fatalf("%v cannot go to %s", s, to)
			}
			for _, o := range list {
				if d := o.deeper(); d == power.Reclaimed && to == power.Hibernated || d == to && o.Used.Before(s.Used) {
					t.Fatalf("%v goes to %s before %v", s, to, o)
				}
			}
			freed := s.Holds
			if to == power.Reclaimed {
				freed = rapid.Int64Range(0, s.Holds).Draw(t, "freed")
			}
			list[n].State, list[n].Holds = to, s.Holds-freed
			short -= freed
			if steps > 2*len(list) {
				t.Fatal("it does not end")
			}
		}
	})
}

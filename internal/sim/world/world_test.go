package world

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"lull/internal/lib/errtest"
	"lull/internal/sim/fault"
)

const (
	account = "111122223333"
	region  = "us-east-1"
	cml     = "ami-00000000000000291"
)

func free() error { return nil }

func launchSpec(token string) LaunchSpec {
	return LaunchSpec{Account: account, Region: region, Image: cml, Type: "m5.large", Min: 1, Max: 1, Token: token, Hibernation: true, VolumeGB: 80, VolumeDevice: RootDevice, EncryptedVolume: true}
}

// op is one random operation on a world.
type op struct {
	Kind  int
	Which int
	Token int
	Type  int
	Wait  time.Duration
}

var opNames = []string{"launch", "launch", "start", "stop", "hibernate", "terminate", "reboot", "external-start", "external-stop", "wait", "tag", "fail-boot", "stick"}

// waits are shorter than, about as long as, and longer than each transition; the
// longest lets terminated instances be forgotten.
var waits = []time.Duration{0, time.Second, 10 * time.Second, 25 * time.Second, 40 * time.Second, 2 * time.Minute, 10 * time.Minute, 2 * time.Hour}

func drawOps(t *rapid.T) []op {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) op {
		return op{
			Kind: rapid.IntRange(0, len(opNames)-1).Draw(t, "kind"), Which: rapid.IntRange(0, 5).Draw(t, "which"),
			Token: rapid.IntRange(0, 7).Draw(t, "token"), Type: rapid.IntRange(0, 1).Draw(t, "type"),
			Wait: rapid.SampledFrom(waits).Draw(t, "wait"),
		}
	}), 1, 120).Draw(t, "ops")
}

// TestWorldStaysLegal sends random requests at random times. It checks that no
// instance makes an illegal change of state, that no client token creates two
// launches, and that an address belongs to one instance.
func TestWorldStaysLegal(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var ops []op
		for range 4 { // rapid alone draws mostly short lists
			ops = append(ops, drawOps(rt)...)
		}
		var err error
		synctest.Test(t, func(*testing.T) { err = runOps(ops) })
		if err != nil {
			rt.Fatalf("%v\nafter %+v", err, ops)
		}
	})
}

func runOps(ops []op) error {
	w, err := New(Config{AddressPool: "127.64.0.0/28", Regions: []RegionConfig{{Name: region, Capacity: map[string]int{"m5.large": 2}}}, Profiles: map[string]Profile{
		"p": {Labs: 2, Users: []UserScript{{Name: "u", Days: "daily", From: "00:00", To: "23:00", Starts: true}}},
	}, LaunchedProfile: "p"})
	if err != nil {
		return err
	}
	tokens := map[string]string{}
	var ids []string
	for _, o := range ops {
		one := []string{"i-00000000000000000"}
		if len(ids) > 0 {
			one[0] = ids[o.Which%len(ids)]
		}
		switch opNames[o.Kind] {
		case "launch":
			s := launchSpec(fmt.Sprint("t", o.Token))
			s.Type = []string{"m5.large", "m5.xlarge"}[o.Type]
			if id, err := launchOne(w, s, tokens); err != nil {
				return err
			} else if id != "" && !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		case "start":
			if len(ids) > 0 {
				one = append(one, ids[(o.Which+1)%len(ids)])
			}
			_, _ = w.Start(account, region, one, "api", free) // refusals are allowed; the invariants are checked below
		case "stop", "hibernate":
			_, _ = w.Stop(account, region, one, StopOptions{Hibernate: opNames[o.Kind] == "hibernate"}, "api", free)
		case "terminate":
			_, _ = w.Terminate(account, region, one, "api", free)
		case "reboot":
			_ = w.Reboot(account, region, one, free)
		case "external-start":
			_ = w.External(one[0], "start", "user")
		case "external-stop":
			_ = w.External(one[0], "stop", []string{"user", "server", "instance", "spot"}[o.Token%4])
		case "tag":
			_ = w.Tag(account, region, one, []Tag{{fmt.Sprint("k", o.Token), "v"}}, free)
		case "fail-boot":
			if _, err := w.Faults.Add(fault.Rule{Service: "ec2", Action: "boot", Kind: fault.Error, Code: "Server.InternalError", Count: 1}); err != nil {
				return err
			}
		case "stick":
			yes := o.Token == 0
			_ = w.Set(one[0], Attributes{Stuck: &yes})
		}
		time.Sleep(o.Wait)
		if err := legal(w); err != nil {
			return fmt.Errorf("%s: %w", opNames[o.Kind], err)
		}
	}
	return nil
}

func launchOne(w *World, s LaunchSpec, tokens map[string]string) (id string, err error) {
	_, lerr := w.Launch(s, free, func(i *Instance, _ Moment) { id = i.ID })
	before, known := tokens[s.Token]
	switch {
	case lerr == nil && known && before != id+s.Type && id != "":
		return "", fmt.Errorf("token %s stands for %s and %s", s.Token, before, id+s.Type)
	case lerr == nil && !known:
		tokens[s.Token] = id + s.Type
	}
	return id, nil
}

func legal(w *World) error {
	addrs := map[string]string{}
	up := 0
	var err error
	w.All(func(i *Instance, now Moment) {
		for k, h := range i.History {
			if h.From != "" && !slices.Contains(h.From.Legal(), h.To) {
				err = fmt.Errorf("%s went from %s to %s", i.ID, h.From, h.To)
			}
			if k > 0 && (i.History[k-1].To != h.From || h.At.Before(i.History[k-1].At)) {
				err = fmt.Errorf("%s has a broken history %+v", i.ID, i.History)
			}
		}
		if n := len(i.History); n > 0 && i.History[n-1].To != i.State {
			err = fmt.Errorf("%s is %s after %+v", i.ID, i.State, i.History[n-1])
		}
		if !i.Stuck && (i.State == Pending || i.State == Stopping || i.State == ShuttingDown) && !i.Due.After(now.World) {
			err = fmt.Errorf("%s is %s forever", i.ID, i.State)
		}
		reachable, down := i.State == Pending || i.State == Running, i.State == Stopped || i.State == Terminated
		if has := i.PublicIP.IsValid(); reachable && !has || down && has {
			err = fmt.Errorf("%s is %s with address %v", i.ID, i.State, i.PublicIP)
		}
		if i.PublicIP.IsValid() {
			if other := addrs[i.PublicIP.String()]; other != "" {
				err = fmt.Errorf("%s and %s share an address", other, i.ID)
			}
			addrs[i.PublicIP.String()] = i.ID
		}
		if i.Type == "m5.large" && (i.State == Pending || i.State == Running || i.State == Stopping) {
			up++
		}
	})
	if up > 2 && err == nil {
		err = fmt.Errorf("%d instances are up where there is room for 2", up)
	}
	return err
}

func TestSavedWorldGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := Config{Profiles: map[string]Profile{"p": {Labs: 2, History: 50, Users: []UserScript{{Name: "u", Days: "daily", From: "00:00", To: "23:30"}}}},
			Workers: []WorkerConfig{{Name: "a", Count: 3, Profile: "p"}}}
		w, err := New(cfg)
		errtest.None(t, err)
		errtest.Get(w.Launch(launchSpec("tok"), free, func(*Instance, Moment) {}))(t)
		time.Sleep(3 * time.Hour)
		errtest.None(t, w.External("a-1", "stop", "user"))
		var file bytes.Buffer
		errtest.None(t, w.Save(&file))
		again, err := New(cfg)
		errtest.None(t, err)
		errtest.None(t, again.Load(&file))
		time.Sleep(5 * time.Hour)
		if diff := cmp.Diff(picture(w), picture(again)); diff != "" {
			t.Error(diff)
		}
		n := 0
		if _, err := again.Launch(launchSpec("tok"), free, func(*Instance, Moment) { n++ }); err != nil || n != 1 {
			t.Errorf("repeated launch after a restart: %d, %v", n, err)
		}
	})
}

// picture returns everything about a world that a client can see.
func picture(w *World) []string {
	var out []string
	w.All(func(i *Instance, now Moment) {
		out = append(out, fmt.Sprintln(i.ID, i.Name, i.State, i.PublicIP, i.Tags, i.Reason, i.Boots, i.History))
		if i.Host != nil {
			w.background(now, i.Host)
			_ = i.Host.Telemetry(now).Each(nil, func(b []byte) error { out = append(out, string(b)); return nil })
		}
	})
	return out
}

// TestWeekOfUsers checks that scripted users, read once an hour for a week, come only
// on their days and hours, that everything they do is in the telemetry, and that the
// same seed gives the same week.
func TestWeekOfUsers(t *testing.T) {
	week := func(step time.Duration) (stamps []time.Time, all []string) {
		synctest.Test(t, func(t *testing.T) {
			start := time.Date(2026, 3, 2, 0, 0, 0, 0, time.UTC) // a Monday
			w, err := New(Config{Start: start, Timing: Timing{Background: -1}, Profiles: map[string]Profile{"p": {Labs: 3, Users: []UserScript{
				{Name: "a", Chance: 1}, {Name: "b", From: "13:00", To: "15:00", Chance: 1},
			}}}, Workers: []WorkerConfig{{Name: "h", Profile: "p"}}})
			if err != nil {
				t.Fatal(err)
			}
			offset := time.Until(start)
			for end := time.Now().Add(7 * 24 * time.Hour); time.Now().Before(end); time.Sleep(step) {
				w.HostAt("h", func(*Host, Moment, Reach) {})
			}
			w.HostAt("h", func(h *Host, now Moment, r Reach) {
				if r != Ready {
					t.Errorf("host is at %d", r)
				}
				for _, e := range h.events {
					stamps = append(stamps, time.UnixMilli(e.at).Add(offset).UTC())
				}
				_ = h.Telemetry(now).Each(nil, func(b []byte) error { all = append(all, string(b)); return nil })
			})
		})
		return stamps, all
	}
	stamps, all := week(time.Hour)
	if len(all) != len(stamps) || len(all) < 5*60 {
		t.Errorf("%d events, %d shown", len(stamps), len(all))
	}
	days := map[time.Weekday]int{}
	for _, s := range stamps {
		days[s.Weekday()]++
		if s.Hour() < 8 || s.Hour() > 17 {
			t.Errorf("a user works at %s", s)
		}
	}
	if days[time.Saturday]+days[time.Sunday] > 0 || len(days) != 5 {
		t.Errorf("events by day: %v", days)
	}
	if _, lazy := week(28 * time.Hour); !slices.Equal(all, lazy) {
		t.Errorf("the week depends on how often it is observed: %d events, %d", len(all), len(lazy))
	}
}

func TestUserFindsMachineGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, err := New(Config{Start: time.Date(2026, 3, 2, 10, 0, 0, 0, time.UTC), Profiles: map[string]Profile{"p": {Labs: 1, Users: []UserScript{{Name: "u", Chance: 1, Starts: true}}}},
			Workers: []WorkerConfig{{Name: "h", Profile: "p"}}})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		errtest.None(t, w.External("h", "stop", "server"))
		time.Sleep(3 * time.Hour)
		w.Find("h", func(i *Instance, _ Moment) {
			if i.State != Running || i.Host.Interruptions != 1 {
				t.Errorf("state %s, %d interruptions; the user must have started it at the console", i.State, i.Host.Interruptions)
			}
			if by := i.History[len(i.History)-2].By; by != "user" {
				t.Errorf("started by %q", by)
			}
		})
	})
}

// TestProportions checks the proportions of the categories in a history of 3,136
// events.
func TestProportions(t *testing.T) {
	b := BaseHistory{Events: 3136, Seed: 99, From: time.Unix(0, 0), To: time.Unix(1e6, 0)}
	count := map[string]int{}
	for k := range b.Events {
		e := b.event(k)
		count[Categories[e.what]]++
		if userMade(e.what) && e.what != catUserActivity {
			count["relevant"]++
		}
	}
	if count["relevant"] != 226 || count["system_stats"] != 207 || count["running_nodes"] != 207 {
		t.Errorf("%v", count)
	}
}

func TestMetricsFollowTheMachine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, err := New(Config{Workers: []WorkerConfig{{Name: "h"}}})
		if err != nil {
			t.Fatal(err)
		}
		var m Metric
		w.Find("h", func(i *Instance, _ Moment) {
			m = Metric{Account: i.Account, Region: i.Region, Namespace: "AWS/EC2", Name: "CPUUtilization", Dimensions: Tags{{"InstanceId", i.ID}}}
		})
		time.Sleep(time.Hour)
		errtest.None(t, w.External("h", "stop", "user"))
		stopped := time.Now()
		time.Sleep(time.Hour)
		n := len(w.Points(m, stopped.Add(-time.Hour), stopped, time.Minute))
		after := len(w.Points(m, stopped.Add(2*time.Minute), time.Now(), time.Minute))
		if n != 60 || after != 0 {
			t.Errorf("%d points while running, %d after", n, after)
		}
	})
}

package world

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/sim/fault"
)

func refusal(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return ""
}

func TestStartTogetherNeedsRoomForAll(t *testing.T) {
	w, err := New(Config{Regions: []RegionConfig{{Name: region, Capacity: map[string]int{"m5.large": 2}}}, Workers: []WorkerConfig{{Name: "a", Count: 3, State: Stopped}}})
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	w.All(func(i *Instance, _ Moment) { ids = append(ids, i.ID) })
	if _, err := w.Start(account, region, ids, "api", free); refusal(err) != "InsufficientInstanceCapacity" {
		t.Errorf("three starts with room for two: %v", err)
	}
	w.All(func(i *Instance, _ Moment) {
		if i.State != Stopped {
			t.Errorf("a refused start left %s %s", i.ID, i.State)
		}
	})
	if _, err := w.Start(account, region, ids[:2], "api", free); err != nil {
		t.Error(err)
	}
}

// TestAddressesComeRound checks the assignment of addresses from a small pool, by
// restarting one instance while another keeps running.
func TestAddressesComeRound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, err := New(Config{AddressPool: "127.70.0.0/28", Workers: []WorkerConfig{{Name: "stays"}, {Name: "cycles"}}})
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{}
		for range 20 {
			for _, op := range []string{"stop", "start"} {
				errtest.None(t, w.External("cycles", op, "user"))
				time.Sleep(time.Minute)
			}
			errtest.None(t, legalAddresses(w))
			w.Find("cycles", func(i *Instance, _ Moment) { seen[i.PublicIP.String()] = true })
		}
		if len(seen) != 14 {
			t.Errorf("%d addresses were used of 14 that are free", len(seen))
		}
	})
}

func legalAddresses(w *World) error {
	seen := map[string]string{}
	var err error
	w.All(func(i *Instance, _ Moment) {
		if other := seen[i.PublicIP.String()]; other != "" {
			err = errors.New(other + " and " + i.Name + " share an address")
		}
		seen[i.PublicIP.String()] = i.Name
		if w.byPublic[i.PublicIP] != i {
			err = errors.New("the address of " + i.Name + " leads elsewhere")
		}
	})
	return err
}

func TestReadsLagBehindLaunches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, err := New(Config{Consistency: Consistency{Instances: Duration(5 * time.Second)}})
		if err != nil {
			t.Fatal(err)
		}
		var id string
		errtest.Get(w.Launch(launchSpec("a"), free, func(i *Instance, _ Moment) { id = i.ID }))(t)
		_, err = w.Instances(Query{Account: account, Region: region, IDs: []string{id}}, func(*Instance, Moment) {})
		if refusal(err) != "InvalidInstanceID.NotFound" {
			t.Errorf("at once: %v", err)
		}
		time.Sleep(5 * time.Second)
		if _, err = w.Instances(Query{Account: account, Region: region, IDs: []string{id}}, func(*Instance, Moment) {}); err != nil {
			t.Errorf("after 5 s: %v", err)
		}
	})
}

func TestTerminatedIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		var id string
		visit := func(i *Instance, _ Moment) { id = i.ID }
		errtest.Get(w.Launch(launchSpec("a"), free, visit))(t)
		first := id
		time.Sleep(time.Minute)
		errtest.None(t, w.External(id, "terminate", "user"))
		count := func() (n int) {
			errtest.Get(w.Instances(Query{Account: account, Region: region}, func(*Instance, Moment) { n++ }))(t)
			return n
		}
		time.Sleep(50 * time.Minute)
		if n := count(); n != 1 {
			t.Errorf("%d instances after 50 min", n)
		}
		time.Sleep(20 * time.Minute)
		if n := count(); n != 0 || len(w.byID) != 0 {
			t.Errorf("%d instances after 70 min, %d kept", n, len(w.byID))
		}
		id = ""
		if _, err := w.Launch(launchSpec("a"), free, visit); err != nil || id != "" {
			t.Errorf("the token of a forgotten instance launched %q, %v", id, err)
		}
		time.Sleep(25 * time.Hour)
		if _, err := w.Launch(launchSpec("a"), free, visit); err != nil || id == "" || id == first {
			t.Errorf("a day later the token launched %q, %v", id, err)
		}
	})
}

// TestReasons checks that the reasons for stops have EC2's words.
func TestReasons(t *testing.T) {
	for _, x := range []struct{ op, by, code string }{
		{"stop", "user", "Client.UserInitiatedShutdown"},
		{"hibernate", "api", "Client.UserInitiatedHibernate"},
		{"stop", "server", "Server.ScheduledStop"},
		{"stop", "spot", "Server.SpotInstanceShutdown"},
		{"stop", "instance", "Client.InstanceInitiatedShutdown"},
	} {
		synctest.Test(t, func(t *testing.T) {
			w, err := New(Config{Workers: []WorkerConfig{{Name: "h", Hibernation: true}}})
			if err != nil {
				t.Fatal(err)
			}
			errtest.None(t, w.External("h", x.op, x.by))
			time.Sleep(5 * time.Minute)
			w.Find("h", func(i *Instance, _ Moment) {
				if i.State != Stopped || i.Reason.Code != x.code || i.Boots != 1 {
					t.Errorf("%+v: %s, %s, %d boots", x, i.State, i.Reason.Code, i.Boots)
				}
			})
			errtest.None(t, w.External("h", "start", "user"))
			time.Sleep(5 * time.Minute)
			w.Find("h", func(i *Instance, _ Moment) {
				if want := map[bool]int{true: 1, false: 2}[x.op == "hibernate"]; i.Boots != want || i.Reason.Code != "" {
					t.Errorf("%+v: %d boots after the start, reason %q", x, i.Boots, i.Reason.Code)
				}
			})
		})
	}
}

func TestFailedBoot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, err := New(Config{Workers: []WorkerConfig{{Name: "h", State: Stopped}}})
		if err != nil {
			t.Fatal(err)
		}
		errtest.Get(w.Faults.Add(fault.Rule{Service: "ec2", Action: "boot", Kind: fault.Error, Code: "Server.InsufficientInstanceCapacity"}))(t)
		errtest.None(t, w.External("h", "start", "user"))
		var id string
		errtest.Get(w.Launch(launchSpec(""), free, func(i *Instance, _ Moment) { id = i.ID }))(t)
		time.Sleep(2 * time.Minute)
		for ref, want := range map[string]State{"h": Stopped, id: Terminated} {
			w.Find(ref, func(i *Instance, _ Moment) {
				if i.State != want || i.Reason.Code != "Server.InsufficientInstanceCapacity" {
					t.Errorf("%s is %s because of %q", ref, i.State, i.Reason.Code)
				}
			})
		}
	})
}

func TestThrottle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, err := New(Config{Limits: Limits{Reads: Rate{Rate: 2, Burst: 5}}})
		if err != nil {
			t.Fatal(err)
		}
		refused := func() (n int) {
			for range 10 {
				if w.Throttled(account, region, "DescribeInstances") {
					n++
				}
			}
			return n
		}
		if n := refused(); n != 5 {
			t.Errorf("%d of 10 refused, want 5", n)
		}
		time.Sleep(time.Second)
		if n := refused(); n != 8 {
			t.Errorf("a second later %d of 10 refused, want 8", n)
		}
		if w.Throttled(account, region, "StopInstances") || w.Throttled(account, "eu-west-1", "DescribeInstances") {
			t.Error("a bucket is shared")
		}
	})
}

// TestSpeed checks that at speed 60 an instance boots 60 times as fast, and that all
// times on the wire are in the client's time.
func TestSpeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, err := New(Config{Speed: 60, Timing: Timing{Jitter: -1}})
		if err != nil {
			t.Fatal(err)
		}
		var id string
		errtest.Get(w.Launch(launchSpec(""), free, func(i *Instance, _ Moment) { id = i.ID }))(t)
		from := time.Now()
		state := func() (s State, at time.Time) {
			w.Find(id, func(i *Instance, _ Moment) { s, at = i.State, i.History[len(i.History)-1].At })
			return s, at
		}
		time.Sleep(400 * time.Millisecond)
		if s, _ := state(); s != Pending {
			t.Errorf("after 0.4 s: %s", s)
		}
		errtest.None(t, w.SetSpeed(10))
		time.Sleep(200 * time.Millisecond) // 24 s and 2 s of the world's time: one second more than a boot takes
		s, at := state()
		if took := at.Sub(from); s != Running || took < 499*time.Millisecond || took > 501*time.Millisecond {
			t.Errorf("%s after %s, want running after 0.5 s", s, took)
		}
	})
}

// TestHibernationNeeds checks that a launch with hibernation must meet EC2's
// requirements.
func TestHibernationNeeds(t *testing.T) {
	for name, c := range map[string]struct {
		spec LaunchSpec
		code string
	}{
		"the image's own root":   {LaunchSpec{Type: "m5.large"}, "UnsupportedHibernationConfiguration"},
		"not encrypted":          {LaunchSpec{Type: "m5.large", VolumeGB: 200, VolumeDevice: RootDevice}, "UnsupportedHibernationConfiguration"},
		"another device":         {LaunchSpec{Type: "m5.large", VolumeGB: 200, VolumeDevice: "/dev/sdf", EncryptedVolume: true}, "UnsupportedHibernationConfiguration"},
		"no room for the memory": {LaunchSpec{Type: "m5.2xlarge", Image: "ami-0000000000000d012", VolumeGB: 32, VolumeDevice: RootDevice, EncryptedVolume: true}, "UnsupportedHibernationConfiguration"},
		"below the snapshot":     {LaunchSpec{Type: "m5.large", VolumeGB: 10, VolumeDevice: RootDevice, EncryptedVolume: true}, "InvalidBlockDeviceMapping"},
		"metal":                  {LaunchSpec{Type: "c5.metal", VolumeGB: 500, VolumeDevice: RootDevice, EncryptedVolume: true}, "UnsupportedHibernationConfiguration"},
		"as it should be":        {LaunchSpec{Type: "m5.large", VolumeGB: 60, VolumeDevice: RootDevice, EncryptedVolume: true}, ""},
	} {
		w, err := New(Config{Regions: []RegionConfig{{Name: region}}})
		if err != nil {
			t.Fatal(err)
		}
		s := c.spec
		s.Account, s.Region, s.Min, s.Max, s.Hibernation = account, region, 1, 1, true
		if s.Image == "" {
			s.Image = "ami-00000000000000290"
		}
		if _, err := w.Launch(s, free, func(*Instance, Moment) {}); refusal(err) != c.code {
			t.Errorf("%s: %v, want %q", name, err, c.code)
		}
	}
}

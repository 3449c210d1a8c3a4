package controller_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"

	"lull/internal/controller"
	"lull/internal/controller/cmlconsole"
	"lull/internal/controller/ec2cloud"
	"lull/internal/core/evidence"
	"lull/internal/core/savings"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/lib/memnet"
	"lull/internal/platform/ec2"
	"lull/internal/platform/journal"
	"lull/internal/protocol/control"
	"lull/internal/server"
	"lull/internal/server/access"
	"lull/internal/sim"
	"lull/internal/sim/world"
	"lull/internal/store/mem"
)

const weekRegion = "us-east-1"

// rootGB is the size of every simulated machine's root volume.
const rootGB = 50

// scripts returns a scenario with one scripted user per worker.
func scripts(seed uint64) world.Config {
	of := func(u ...world.UserScript) world.Profile { return world.Profile{Users: u, Labs: 3} }
	hours := func(h int) world.Duration { return world.Duration(time.Duration(h) * time.Hour) }
	c := world.Config{
		Seed: seed, Regions: []world.RegionConfig{{Name: weekRegion}},
		Timing: world.Timing{Background: hours(2)},
		Profiles: map[string]world.Profile{
			"office": of(world.UserScript{Name: "anna", Stops: 0.5}),
			"team": of(world.UserScript{Name: "bo", Every: world.Duration(4 * time.Minute)}, world.UserScript{Name: "cleo", From: "11:00", To: "20:00"},
				world.UserScript{Name: "dan", Days: "daily", From: "06:30", To: "10:00", Every: world.Duration(11 * time.Minute)}),
			"night":  of(world.UserScript{Name: "eve", Days: "daily", From: "21:00", To: "03:00", Every: world.Duration(9 * time.Minute)}),
			"rare":   of(world.UserScript{Name: "fay", Days: "mon,thu", Every: world.Duration(25 * time.Minute), Break: hours(3)}),
			"unused": of(),
		},
	}
	for _, name := range []string{"office", "team", "night", "rare", "unused", "evenings"} {
		profile := name
		if name == "evenings" {
			profile = "unused"
		}
		c.Workers = append(c.Workers, world.WorkerConfig{Name: name, Type: "t3.small", Profile: profile, Up: hours(1)})
	}
	return c
}

// used returns when each worker is used under the same scripts if it is never paused.
func used(w *world.World) (map[string][]time.Time, error) {
	out := map[string][]time.Time{}
	for _, c := range w.Config().Workers {
		var views []*world.Telemetry
		w.HostAt(c.Name, func(h *world.Host, now world.Moment, _ world.Reach) { views = append(views, h.Telemetry(now)) })
		if len(views) == 0 {
			return nil, fmt.Errorf("%s is not up in the world of the script", c.Name)
		}
		if err := views[0].Each(nil, func(b []byte) error {
			var e struct {
				Timestamp time.Time
				Data      struct {
					User string `json:"user_id"`
				}
			}
			if err := json.Unmarshal(b, &e); err != nil {
				return err
			}
			if e.Data.User != "" && e.Data.User != world.AdminID {
				out[c.Name] = append(out[c.Name], e.Timestamp)
			}
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// recorded is a fleet in dry run over the simulated region, with its journal and the
// API that replays the journal.
type recorded struct {
	sim     *sim.Server
	fleet   *fleet.Fleet
	api     *server.Server
	token   string
	workers map[string]worker.Worker // by name
	open    func()                   // makes the API answer
	end     func() error
}

// record starts a fleet in dry run over the scripts and imports every worker. It must
// be called in a bubble. The caller must call end.
func record(ctx context.Context, seed uint64, dir string) (_ *recorded, err error) {
	r := &recorded{workers: map[string]worker.Worker{}}
	if r.sim, err = sim.New(sim.Options{Scenario: scripts(seed)}); err != nil {
		return nil, err
	}
	var network memnet.Network
	l, err := network.Listen(":80") // on every address: the Host header selects the service
	if err != nil {
		return nil, err
	}
	tls, err := network.Listen(":8443")
	if err != nil {
		return nil, err
	}
	tr := &http.Transport{DialContext: network.DialContext}
	region := ec2.New(aws.Config{Region: weekRegion, HTTPClient: &http.Client{Transport: tr}, Credentials: credentials.NewStaticCredentialsProvider("AKIASIM", "x", "")}, "http://cloud", ec2.Limits{})
	db := mem.New(mem.Options{}).Client()
	// List every five minutes instead of every 30 s; the times of checks do not
	// depend on the listings.
	set := map[string]any{"reconcile_interval": 300, "worker_metrics_interval": 21600, "discovery_import": "off", "worker_auto_pause_snooze_minutes": 20}
	if r.fleet, err = fleet.New(fleet.Options{Store: db, ID: "fleet-1", File: settings.Layer{Values: set}}); err != nil {
		return nil, err
	}
	operator := audit.Actor{Name: "anna", Kind: audit.KindUser}
	size := launch.Template{Name: "small", InstanceType: "t3.small", AMINameFilter: "cml*", Enabled: true}
	if _, err := r.fleet.PutTemplate(ctx, operator, size, 0); err != nil {
		return nil, err
	}
	for _, c := range r.sim.World.Config().Workers {
		in := fleet.ImportedWorker{Name: c.Name, AWSRegion: weekRegion, TemplateName: "small"}
		insecure := true
		in.TLSInsecure = &insecure
		r.sim.World.Find(c.Name, func(i *world.Instance, _ world.Moment) { in.EC2InstanceID = i.ID })
		if r.workers[c.Name], err = r.fleet.ImportWorker(ctx, operator, in); err != nil {
			return nil, err
		}
	}
	consoles := cmlconsole.New(cmlconsole.Config{Fleet: r.fleet, Port: "8443", Dial: network.DialContext,
		Secret: func(sealed.Secret) (sealed.Plain, error) { return "cml", nil }})
	kept, _, err := journal.Open(dir, journal.Options{SyncEvery: time.Minute})
	if err != nil {
		return nil, err
	}
	ctl, err := controller.New(controller.Config{Fleet: r.fleet, Server: "one", Shadow: true, Journal: kept.Take,
		Clouds:   func(string, string) (controller.Cloud, error) { return ec2cloud.Region(region, nil, nil), nil },
		Consoles: consoles.Console})
	if err != nil {
		return nil, err
	}
	tokens := access.New(db)
	if r.token, err = tokens.First(ctx); err != nil {
		return nil, err
	}
	prices, err := savings.Read(strings.NewReader("kind,region,name,usd,as_of\ninstance," + weekRegion + ",t3.small,0.5,2000-01-01\nstorage," + weekRegion + ",gp3,0.0146,2000-01-01\n"))
	if err != nil {
		return nil, err
	}
	if r.api, err = server.New(server.Options{Fleet: r.fleet, Tokens: tokens, Version: "test", Evidence: kept, Prices: prices}); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	failed := make(chan error, 4)
	run := func(f func(context.Context) error) { wg.Go(func() { failed <- f(ctx) }) }
	run(ctl.Run)
	run(kept.Run)
	run(func(ctx context.Context) error { return r.sim.Run(ctx, sim.Listeners{API: l, CML: tls}) })
	<-ctl.Ready()
	r.open = func() {
		run(r.api.Run)
		<-r.api.Ready()
	}
	r.end = func() error {
		cancel()
		wg.Wait()
		close(failed)
		var errs []error
		for err := range failed {
			errs = append(errs, err)
		}
		tr.CloseIdleConnections()
		consoles.Close()
		db.Close()
		return errors.Join(append(errs, kept.Close())...)
	}
	return r, nil
}

// ask calls the API and decodes the answer into out.
func (r *recorded) ask(method, path string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	q := httptest.NewRequest(method, "/api/v1"+path, bytes.NewReader(body))
	q.Header.Set("Authorization", "Bearer "+r.token)
	q.Header.Set("Content-Type", "application/json")
	a := httptest.NewRecorder()
	r.api.Handler().ServeHTTP(a, q)
	if a.Code != http.StatusOK {
		return fmt.Errorf("%s: %d %s", path, a.Code, a.Body)
	}
	return json.Unmarshal(a.Body.Bytes(), out)
}

// handStop is a pause computed from the script.
type handStop struct {
	from, to time.Time
	back     bool
}

// off is a period for which a user had stopped a worker.
type off struct{ from, to time.Time }

// byHand computes, from the users' actions alone, the pauses that a policy would
// cause. The worker is paused once it has been unused for timeout and its protection
// of snooze after a start is over. It comes back at the next use.
func byHand(uses []time.Time, offs []off, born, to time.Time, timeout, snooze time.Duration) (out []handStop) {
	last, protected, used := born, born, false
	up := func(until time.Time, back bool) {
		at := last.Add(timeout)
		if protected.After(at) {
			at = protected
		}
		if at.Before(until) {
			out = append(out, handStop{at, until, back})
			if back {
				protected = until.Add(snooze)
			}
		}
	}
	type turn struct {
		at  time.Time
		off *off
	}
	var turns []turn
	for _, u := range uses {
		turns = append(turns, turn{at: u})
	}
	for i := range offs {
		turns = append(turns, turn{at: offs[i].from, off: &offs[i]})
	}
	slices.SortFunc(turns, func(a, b turn) int { return a.at.Compare(b.at) })
	for _, x := range turns {
		if !x.at.Before(to) {
			break
		}
		up(x.at, x.off == nil)
		if x.off == nil {
			last, used = x.at, true
			continue
		}
		protected = x.off.to.Add(snooze)
		if !x.off.to.Before(to) {
			return out
		}
		if !used {
			last = x.off.to // until it is used, idle time counts from its start
		}
	}
	up(to, false)
	return out
}

// TestRecordedWeek checks simulations of three policies over the journal of a week. A
// controller in dry run watches scripted users over the network and writes the
// journal to disk. The API's results must match, to the second, those computed from
// the script. With -short, which make check sets, the week has two days.
func TestRecordedWeek(t *testing.T) {
	seed := rand.Uint64()
	if s := os.Getenv("LULL_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		seed = n
	}
	t.Logf("LULL_SEED=%d repeats this", seed)
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		if err := recordedWeek(t, seed, dir); err != nil {
			t.Error(err)
		}
	})
}

func recordedWeek(t *testing.T, seed uint64, dir string) (err error) {
	days := 7
	if testing.Short() {
		days = 2
	}
	unseen, err := world.New(scripts(seed))
	if err != nil {
		return err
	}
	r, err := record(t.Context(), seed, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.end()) }()
	time.Sleep(20 * time.Minute) // until every worker has been checked
	from := time.Now()
	if err := evenings(r, from, days); err != nil {
		return err
	}
	to := from.Add(time.Duration(days) * 24 * time.Hour)
	time.Sleep(time.Until(to.Add(2 * time.Hour))) // use is reported with a delay
	r.open()
	uses, err := used(unseen)
	if err != nil {
		return err
	}
	w := &weighed{recorded: r, uses: uses, from: from, to: to}
	for name := range r.workers {
		if err := w.worker(t, name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	return w.all(t)
}

// evenings makes a user stop a worker each evening and start it each morning.
func evenings(r *recorded, from time.Time, days int) error {
	ctx := context.Background()
	bo := audit.Actor{Name: "bo", Kind: audit.KindUser}
	id := r.workers["evenings"].ID
	for day := range days {
		evening := from.Add(time.Duration(day)*24*time.Hour + 20*time.Hour)
		time.Sleep(time.Until(evening))
		if _, err := r.fleet.StopWorker(ctx, bo, id); err != nil {
			return err
		}
		if day == days-1 {
			return nil
		}
		time.Sleep(10 * time.Hour)
		if _, err := r.fleet.ResumeWorker(ctx, bo, id); err != nil {
			return err
		}
	}
	return nil
}

// weekPolicies are the simulated policies. A policy without a snooze uses the
// fleet's.
var weekPolicies = []control.SimulatedPolicy{
	{Name: "aggressive", TimeoutMinutes: 15},
	{Name: "balanced", TimeoutMinutes: 60, SnoozeMinutes: new(30)},
	{Name: "conservative", TimeoutMinutes: 240, SnoozeMinutes: new(60)},
}

const (
	inForce   = 20 * time.Minute // the fleet's snooze
	tooSoon   = 15 * time.Minute // use this soon after a pause makes it a false stop
	oneSecond = time.Second      // uncertainty of a clock with whole seconds
)

// weighed compares the API's results with those computed from the script.
type weighed struct {
	*recorded
	uses     map[string][]time.Time
	from, to time.Time
	stops    [3]int
	wrong    [3]int
	hours    [3]float64
	slack    [3]float64
}

func (w *weighed) simulate(ids ...string) (s control.Simulation, err error) {
	return s, w.ask("POST", "/simulate", control.Simulate{Policies: weekPolicies, From: w.from.Format(time.RFC3339Nano), To: w.to.Format(time.RFC3339Nano), WorkerIDs: ids, WindowMinutes: int(tooSoon.Minutes())}, &s)
}

// worker compares the pauses of one worker.
func (w *weighed) worker(t *testing.T, name string) error {
	is := w.workers[name]
	s, err := w.simulate(is.ID)
	if err != nil {
		return err
	}
	if len(s.Missing) > 0 {
		return fmt.Errorf("missing: %+v", s.Missing)
	}
	var line control.Timeline
	if err := w.ask("GET", "/workers/"+is.ID+"/timeline?from="+w.from.UTC().Format(time.RFC3339Nano)+"&to="+w.to.UTC().Format(time.RFC3339Nano), nil, &line); err != nil {
		return err
	}
	var offs []off
	var up time.Time // idle time counts from the launch
	w.sim.World.Find(name, func(i *world.Instance, _ world.Moment) { up = i.Launched })
	for _, p := range line.Power {
		if p.Status == "RUNNING" {
			continue
		}
		if n := len(offs); n > 0 && offs[n-1].to.Equal(p.From) {
			offs[n-1].to = p.To
			continue
		}
		offs = append(offs, off{p.From, p.To})
	}
	for i, p := range weekPolicies {
		snooze := inForce
		if p.SnoozeMinutes != nil {
			snooze = time.Duration(*p.SnoozeMinutes) * time.Minute
		}
		want := byHand(w.uses[name], offs, up, w.to, time.Duration(p.TimeoutMinutes)*time.Minute, snooze)
		if err := w.policy(i, s.Policies[i], want, offs); err != nil {
			t.Errorf("%s under %s: %v", name, p.Name, err)
		}
	}
	return nil
}

func (w *weighed) policy(i int, is control.SimulatedOutcome, want []handStop, offs []off) error {
	slices.SortFunc(is.Stops, func(a, b evidence.Stop) int { return a.From.Compare(b.From) })
	hours, wrong := 0.0, 0
	if len(want) > 0 && want[0].from.Before(w.from) { // a pause that began before the week: only its hours in the week count
		hours = want[0].to.Sub(w.from).Hours()
		want = want[1:]
	}
	if len(is.Stops) != len(want) || is.Pauses != len(want) {
		return fmt.Errorf("%d pauses, by the script %d:\n%+v\n%+v", is.Pauses, len(want), is.Stops, want)
	}
	for k, x := range want {
		g := is.Stops[k]
		early := x.back && x.to.Sub(x.from) <= tooSoon
		if g.From.Sub(x.from).Abs() > oneSecond || g.To.Sub(x.to).Abs() > oneSecond || g.Back != x.back || g.False != early {
			return fmt.Errorf("pause %d is %+v, by the script %s to %s, back %t", k, g, x.from, x.to, x.back)
		}
		hours += x.to.Sub(x.from).Hours()
		if early {
			wrong++
		}
	}
	slack := float64(2*len(want)+1) * oneSecond.Hours()
	if d := is.AvoidedHours - hours; d > slack || d < -slack || is.FalseStops != wrong {
		return fmt.Errorf("%g hours avoided and %d false stops, by the script %g and %d", is.AvoidedHours, is.FalseStops, hours, wrong)
	}
	down := 0.0
	for _, o := range offs {
		down += o.to.Sub(o.from).Hours()
	}
	week := w.to.Sub(w.from).Hours()
	if sum := is.AvoidedHours + is.RunningHours + is.OtherHours + is.UnknownHours; sum < week-slack || sum > week+slack || is.OtherHours < down-slack || is.OtherHours > down+slack {
		return fmt.Errorf("%g avoided, %g running, %g off (by the record %g) and %g unknown are not the %g of a week", is.AvoidedHours, is.RunningHours, is.OtherHours, down, is.UnknownHours, week)
	}
	w.stops[i] += len(want)
	w.wrong[i] += wrong
	w.hours[i] += hours
	w.slack[i] += slack
	return nil
}

// all compares the totals of the fleet, the hours and the money saved, and the
// recommended policy.
func (w *weighed) all(t *testing.T) error {
	s, err := w.simulate()
	if err != nil {
		return err
	}
	best, most := "", 0.0
	for i, is := range s.Policies {
		money := w.hours[i] * (0.5 - rootGB*0.0146/730) // a paused machine keeps its disk
		t.Logf("%s: %d pauses, %d false, %.2f hours avoided, %.2f USD", is.Name, is.Pauses, is.FalseStops, is.AvoidedHours, *is.Sum.Saved)
		if d := is.AvoidedHours - w.hours[i]; d > w.slack[i] || d < -w.slack[i] || is.Pauses != w.stops[i] || is.FalseStops != w.wrong[i] {
			t.Errorf("%s: %d pauses, %d false, %g hours; by the script %d, %d and %g", is.Name, is.Pauses, is.FalseStops, is.AvoidedHours, w.stops[i], w.wrong[i], w.hours[i])
		}
		if d := *is.Sum.Saved - money; d > w.slack[i] || d < -w.slack[i] {
			t.Errorf("%s: %g USD saved, by the script %g", is.Name, *is.Sum.Saved, money)
		}
		if w.wrong[i] == 0 && w.hours[i] > most {
			best, most = is.Name, w.hours[i]
		}
	}
	if s.Recommended != best {
		t.Errorf("%q is recommended, by the script %q", s.Recommended, best)
	}
	if !testing.Short() && (w.stops[0] <= w.stops[2] || w.wrong[0] == 0) {
		t.Errorf("the week tells no policies apart: %v pauses, %v false", w.stops, w.wrong)
	}
	return nil
}

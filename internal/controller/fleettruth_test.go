package controller_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
	"lull/internal/lib/scaletest"
	"lull/internal/protocol/control"
	"lull/internal/sim/fault"
	"lull/internal/sim/truth"
	simworld "lull/internal/sim/world"
)

// What the documentation says each activity source shows of a machine in use. The
// simulated users and loads are made accordingly.
const (
	// CML shows what users do, when they do it.
	userPace = 2 * time.Minute  // a user at work does something at least this often
	cmlLate  = 30 * time.Second // and CML lists it at most this late

	// CloudWatch shows the mean of five minutes. Its newest window may have ended
	// two periods before it is judged.
	cloudWatchPeriod = 5 * time.Minute

	// An agent shows the mean since its last report.
	agentInterval = time.Minute

	idleLoad, usedLoad = 1.0, 60.0 // percent of all CPUs
	activeLoad         = 5.0       // at and above this load a machine counts as in use

	// Where reading costs money, a pause is judged by readings at most readAge old.
	// It is sent at most finalCheck after it was judged.
	readAge    = time.Minute
	finalCheck = 5 * time.Second
)

// hidden is how much use within a window stays below the threshold.
func hidden(window time.Duration) time.Duration {
	return time.Duration(float64(window) * (activeLoad - idleLoad) / (usedLoad - idleLoad))
}

// resolution returns what a set of sources, all of which must be quiet, cannot see.
// blind is for how long new use may go unnoticed. early is how much too early a use
// may seem to have ended. brief is how long a use may last without ever being seen,
// because it stays below the threshold in each of two windows.
func resolution(sources []string) (blind, early, brief time.Duration) {
	blind, early, brief = time.Hour, time.Hour, time.Hour
	for _, s := range sources {
		var b, e, short time.Duration
		switch s {
		case worker.SourceCML:
			b, e = userPace+cmlLate, userPace
		case worker.SourceCloudWatch:
			b, e = 2*cloudWatchPeriod+hidden(cloudWatchPeriod), hidden(cloudWatchPeriod)
			short = 2 * e
		case worker.SourceAgent:
			b, e = agentInterval, hidden(agentInterval)
			short = 2 * e
		}
		blind, early, brief = min(blind, b+finalCheck), min(early, e), min(brief, short)
	}
	return blind, early + time.Second, brief // times are rounded to seconds on the wire
}

// TestTruthFleet compares automatic stops with the truth. Simulated users and loads,
// fixed before the controller starts, define when a machine was in use. A simulated
// cloud, CML and an agent report that use, each with its own resolution, delay, loss,
// staleness and clock error, and with outages. Settings change and controllers are
// killed at random.
//
// No automatic stop may reach EC2 within the timeout after use that the sources could
// show, after use that CloudWatch did show in time, or after the start of the
// machine. A machine that is idle without faults must be stopped.
//
// A controller that ignores the state of an active reading fails in nearly every
// round, and so does one whose final check does not read CloudWatch.
func TestTruthFleet(t *testing.T) {
	t.Setenv("AWS_ENDPOINT_URL", "http://cloud")
	seed, stops := scaletest.Seed(t), 0
	rounds := scaletest.Count(t, "LULL_TRUTH_ROUNDS", 6)
	for i := range rounds {
		synctest.Test(t, func(t *testing.T) { stops += truthRound(t, seed+uint64(i), i) })
	}
	if stops < rounds {
		t.Errorf("%d automatic stops in %d rounds, each of which ends with idleness", stops, rounds)
	}
}

// truthWorld is one round: a machine, its users and loads, and the sources that
// report them.
type truthWorld struct {
	t     *testing.T
	rng   *rand.Rand
	f     *simFleet
	id    string // of the worker
	ec2   string // of its instance
	use   truth.Use
	about string // describes the round in failure messages

	snooze         time.Duration
	launched       bool          // by the controller, so that its first start has a snooze
	lag, agentSkew time.Duration // delay of CloudWatch's windows, and error of the agent's clock
	loss           float64       // share of windows and reports that are lost
	agentDown      time.Time     // the agent is silent until then
	consoles       time.Time     // until then, CML is the only source
	disturbed      time.Time     // until then a fault or a change may delay a stop
	muted          truth.Span    // CloudWatch gets no window that ends within this span

	episodes []episode // to come, in order
	shown    []window  // that CloudWatch has

	sequence uint64
	sampled  time.Time
	lastUse  time.Time
	booting  time.Time // when a user last found CML still booting
	nextUser time.Time
	next     time.Time // start of CloudWatch's next window

	mu      sync.Mutex
	sources []string
	timeout time.Duration
	old     struct {
		sources []string
		timeout time.Duration
		until   time.Time
	}
	stops int
}

func truthRound(t *testing.T, seed uint64, n int) int {
	rng := rand.New(rand.NewPCG(seed, 7))
	pick := func(d time.Duration) time.Duration { return time.Duration(rng.Int64N(int64(d))) }
	off := func(sign int) time.Duration { return time.Duration(sign) * (10*time.Minute + pick(2*time.Hour)) }
	w := &truthWorld{t: t, rng: rng, lag: pick([]time.Duration{time.Minute, 4 * time.Minute}[rng.IntN(2)]), agentSkew: off(n%2*2 - 1), loss: rng.Float64() / 20,
		launched: n%3 > 0, snooze: []time.Duration{0, 10 * time.Minute, 45 * time.Minute}[n%3]}
	skew := off(1 - n%2*2)
	const length, calm = 10 * time.Hour, 4 * time.Hour // calm is without use and faults
	begun := time.Now()
	bursts := begun.Add(3 * time.Hour)
	first := begun.Add(w.snooze + pick(30*time.Minute))
	w.use = truth.Of(append(truth.Draw(rng, first, bursts.Sub(first), 2*time.Hour).Spans(), drawBursts(rng, bursts, begun.Add(length-calm))...)...)
	if n%2 == 1 { // CML's clock is behind, so users' actions seem older than they are
		w.consoles = bursts
	}
	w.plan()
	config := simworld.Config{
		Seed: seed, Regions: []simworld.RegionConfig{{Name: simRegion}}, Timing: simworld.Timing{Background: simworld.Duration(15 * time.Minute)},
		// CML's telemetry was recorded before the image was made.
		Profiles: map[string]simworld.Profile{"used": {History: 50, HistoryAge: simworld.Duration(time.Hour), ClockOffset: simworld.Duration(skew),
			Spoil: simworld.Spoil{Late: 0.2, LateBy: simworld.Duration(cmlLate), Duplicate: 0.05, Reorder: 0.05}}},
		LaunchedProfile: "used",
	}
	if !w.launched {
		config.Workers = []simworld.WorkerConfig{{Name: "m", Type: "t3.small", Profile: "used", Up: simworld.Duration(time.Second)}}
	}
	w.f = newSimFleet(t, config, map[string]any{"worker_auto_pause_snooze_minutes": int(w.snooze.Minutes()), "worker_warn_before_minutes": 1, "idle_detection_interval": 60, "worker_activity_detection_interval": 300,
		"worker_idle_timeout_minutes": 60, "aws_region_configs": map[string]any{simRegion: map[string]any{"subnet_id": "subnet-000000a0", "security_group_ids": []string{"sg-0000000a"}}},
	}, w.serve)
	w.create()
	w.next, w.sampled = begun.Truncate(cloudWatchPeriod).Add(-12*cloudWatchPeriod), begun
	w.set(60*time.Minute, []string{worker.SourceCML})
	w.configure(5*time.Minute, []string{worker.SourceCML})
	w.about = fmt.Sprintf("seed %d, CloudWatch's lag %s, clocks of CML and agent off by %s and %s, loss %.3f", seed, w.lag, skew, w.agentSkew, w.loss)
	w.f.start()
	down, calmed := time.Time{}, false // no controller runs until down
	for end := begun.Add(length); time.Now().Before(end); time.Sleep(time.Second) {
		now := time.Now()
		quiet := now.After(end.Add(-calm))
		if quiet && !calmed { // every source must take part
			calmed = true
			w.configure(15*time.Minute, []string{worker.SourceAgent, worker.SourceCloudWatch, worker.SourceCML})
		}
		if !down.IsZero() && (quiet || now.After(down)) {
			w.f.start()
			w.disturb(5 * time.Minute)
			down = time.Time{}
		}
		w.live(now, down.IsZero())
		if !quiet && w.act(now) {
			continue
		}
		if quiet || now.Second() != 0 {
			continue
		}
		w.missed(now)
		switch rng.IntN(200) { // once a minute
		case 0, 1, 2, 3:
			w.change()
		case 4:
			if down.IsZero() {
				w.f.kill()
				down = now.Add(pick(5 * time.Minute))
				w.disturb(5 * time.Minute)
			}
		case 5:
			w.agentDown = now.Add(pick(30 * time.Minute))
			w.disturb(30 * time.Minute)
		case 6, 7, 8:
			w.outage(pick(30 * time.Minute))
		}
	}
	if s := w.f.worker(w.id); s.Status != power.WorkerStopped {
		t.Errorf("%s: idle and undisturbed for %s it is %s (%s): %v", w.about, calm, s.Status, s.StatusReason, w.blocks())
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	t.Logf("%d automatic stops, %s", w.stops, w.about)
	return w.stops
}

// serve passes calls to the simulator; it asks the truth about each automatic
// stop as it arrives.
func (w *truthWorld) serve(rw http.ResponseWriter, r *http.Request, next http.Handler) {
	if r.Method == http.MethodPost && r.URL.Path == "/" {
		if form := formOf(r); slices.Equal(form["Action"], []string{"StopInstances"}) {
			w.judge(time.Now())
		}
	}
	next.ServeHTTP(rw, r)
}

func (w *truthWorld) judge(now time.Time) {
	is, err := w.f.fleet.Worker(w.t.Context(), w.id)
	if err != nil || !is.PauseReason.Automatic() {
		w.t.Errorf("a stop arrived of a worker whose reason is %q: %v", is.PauseReason, err)
		return
	}
	since, up := w.up()
	if !up {
		return // a repeated call
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stops++
	blind, early, brief := resolution(w.sources)
	timeout, measured := w.timeout, slices.Contains(w.sources, worker.SourceCloudWatch)
	if now.Before(w.old.until) { // the decision may have used the settings before the last change
		b, e, short := resolution(w.old.sources)
		brief = max(brief, short)
		blind, early, timeout = max(blind, b), max(early, e), min(timeout, w.old.timeout)
		measured = measured && slices.Contains(w.old.sources, worker.SourceCloudWatch)
	}
	if err := w.contradicts(now, since, timeout); measured && err != nil {
		w.t.Errorf("%s, timeout %s, sources %v: %v", w.about, timeout, w.sources, err)
	}
	var spans []truth.Span
	for _, s := range w.use.Spans() {
		if s.From.Before(since) { // a user who finds the machine down does not use it
			s.From = since
		}
		if slices.Equal(w.sources, []string{worker.SourceCML}) && s.From.Before(w.booting) && !s.To.Before(w.booting) {
			s.From = w.booting.Add(2 * time.Second) // nor does a user who finds CML booting
		}
		if s.To.Sub(s.From) > brief {
			spans = append(spans, s)
		}
	}
	if err := truth.Of(spans...).Check(now, timeout-early, blind); err != nil {
		w.t.Errorf("%s, timeout %s, sources %v: %v", w.about, timeout, w.sources, err)
	}
	if ran := now.Sub(since); ran < timeout || ran < w.snoozes(is) {
		w.t.Errorf("%s, sources %v: stopped %s after it started, timeout %s, snooze %s", w.about, w.sources, ran, timeout, w.snoozes(is))
	}
}

// create makes the worker, from a machine that is imported or launched.
func (w *truthWorld) create() {
	risks := worker.Profile{AcceptedRisks: []string{worker.RiskNoElasticIP}}
	if !w.launched {
		w.id = w.f.adopt("m", risks).ID
		return
	}
	_, err := w.f.fleet.PutTemplate(w.t.Context(), operator, launch.Template{Name: "small", InstanceType: "t3.small", AMINameFilter: "*cml*", Enabled: true}, 0)
	if err == nil {
		var is worker.Worker
		is, err = w.f.fleet.CreateWorker(w.t.Context(), operator, fleet.NewWorker{Name: "m", AWSRegion: simRegion, TemplateName: "small", Profile: risks})
		w.id = is.ID
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// snoozes returns how long after its start the worker is left alone: only a
// machine that ran when it was found has no snooze.
func (w *truthWorld) snoozes(is worker.Worker) time.Duration {
	if !w.launched && is.LastResumedAt == nil {
		return 0
	}
	return w.snooze
}

// window is a window of CloudWatch, which can be read from shown on.
type window struct {
	end, shown time.Time
	load       float64
}

// contradicts returns an error if CloudWatch spoke against a stop at now: a window
// that had to be read by then shows use within the timeout, or shows use and is the
// newest window. Windows that end before since, when the machine started, do not
// count. w.mu must be held.
func (w *truthWorld) contradicts(now, since time.Time, timeout time.Duration) error {
	newest := true
	for _, x := range slices.Backward(w.shown) {
		if !x.end.After(since) {
			break
		}
		idle, read := now.Sub(x.end), now.Sub(x.shown) > readAge+finalCheck // a newer window may not have been read
		if x.load < activeLoad {
			newest = false
		} else if read && (newest || idle < timeout-time.Second) {
			return fmt.Errorf("acted at %s, though CloudWatch has shown since %s a load of %.0f %% until %s: idle for %s, newest %t",
				now.Format(time.RFC3339), x.shown.Format(time.RFC3339), x.load, x.end.Format(time.RFC3339), idle, newest)
		}
	}
	return nil
}

// up reports whether the simulator's machine is running, and since when.
func (w *truthWorld) up() (since time.Time, up bool) {
	if w.ec2 == "" {
		if w.ec2 = w.f.worker(w.id).EC2InstanceID; w.ec2 == "" {
			return since, false
		}
	}
	w.f.sim.World.Locate(w.ec2, func(i *simworld.Instance, now simworld.Moment) {
		up = i.State == simworld.Running
		for _, h := range i.History {
			if h.To == simworld.Running {
				since = h.At
			}
		}
	})
	return since, up
}

// live simulates one second of the users, the loads and the sources that report them.
func (w *truthWorld) live(now time.Time, served bool) {
	since, up := w.up()
	used := w.use.At(now)
	if !used {
		w.nextUser = now // the next user starts with an action
	}
	if used && !up && now.Second()%10 == 0 {
		if is := w.f.worker(w.id); is.Status == power.WorkerStopped && is.DesiredStatus == power.WorkerStopped {
			if _, err := w.f.fleet.ResumeWorker(w.t.Context(), operator, w.id); err != nil {
				w.t.Errorf("cannot resume: %v", err)
			}
		}
	}
	if now.Second() == 0 && w.f.worker(w.id).Status == power.WorkerFailed { // a start in an outage
		_, err := w.f.fleet.RetryWorker(w.t.Context(), operator, w.id)
		if _, refused := errors.AsType[*failure.Refused](err); err != nil && !refused { // refused means that it is no longer FAILED
			w.t.Errorf("cannot retry: %v", err)
		}
	}
	if used && up && !now.Before(w.nextUser) {
		w.f.sim.World.HostAt(w.ec2, func(h *simworld.Host, m simworld.Moment, r simworld.Reach) {
			if r == simworld.Ready {
				h.Act(m, "start_node", h.UserID("ada"))
				w.nextUser = now.Add(time.Second + time.Duration(w.rng.Int64N(int64(userPace-time.Second))))
				return
			}
			w.mu.Lock()
			w.booting = now
			w.mu.Unlock()
		})
	}
	w.measure(now, since, up)
	if up && served && now.After(w.agentDown) && now.Second()%2 == 0 { // reading the record is the most expensive step here
		is := w.f.worker(w.id)
		consulted := is.AgentConsulted()
		if consulted && now.Sub(w.sampled) >= 2*time.Second || now.Sub(w.sampled) >= agentInterval-5*time.Second {
			w.report(now, since, &is, consulted)
		}
	}
}

// load is the mean load of a stretch in which the machine ran.
func (w *truthWorld) load(from, to time.Time) float64 {
	return idleLoad + (usedLoad-idleLoad)*w.use.Share(from, to)
}

// measure publishes the windows that have ended in CloudWatch, each after its lag.
func (w *truthWorld) measure(now, since time.Time, up bool) {
	for end := w.next.Add(cloudWatchPeriod); !now.Before(end.Add(w.lag)); end = w.next.Add(cloudWatchPeriod) {
		from := w.next
		w.next = end
		if muted := end.After(w.muted.From) && end.Before(w.muted.To); !up || end.Before(since) || muted || w.rng.Float64() < w.loss {
			continue
		}
		if from.Before(since) {
			from = since
		}
		err := w.f.sim.World.Put(simworld.Metric{Account: "111122223333", Region: simRegion, Namespace: "AWS/EC2", Name: "CPUUtilization",
			Dimensions: simworld.MakeTags(map[string]string{"InstanceId": w.ec2})}, simworld.Datum{At: end.Add(-cloudWatchPeriod), Value: w.load(from, end)})
		if err != nil {
			w.t.Errorf("cannot put a metric: %v", err)
		}
		w.mu.Lock()
		w.shown = append(w.shown, window{end: end, shown: now, load: w.load(from, end)})
		w.mu.Unlock()
	}
}

// report sends one report of the agent, whose clock is wrong by agentSkew.
func (w *truthWorld) report(now, since time.Time, is *worker.Worker, consulted bool) {
	from := w.sampled
	if from.Before(since) {
		from = since
	}
	w.sampled = now
	if !from.Before(now) {
		return
	}
	skewed := now.Add(w.agentSkew)
	load := w.load(from, now)
	r := idle.Reading{Signal: "cpu", State: idle.Quiet, Value: load, Threshold: activeLoad, At: skewed}
	if load >= activeLoad {
		r.State, w.lastUse = idle.Active, now
	}
	if w.rng.Float64() < w.loss {
		return // the report is lost, but the agent remembers the use
	}
	w.sequence++
	if w.lastUse.Before(since) {
		w.lastUse = since
	}
	lastUse := time.Time{}
	if !w.lastUse.IsZero() {
		lastUse = w.lastUse.Add(w.agentSkew)
	}
	report := control.AgentReport{At: skewed, Sequence: w.sequence, StartedAt: since.Add(w.agentSkew), BootID: since.String(), InstanceID: w.ec2, Region: simRegion,
		Interval: idle.Duration(agentInterval), Readings: []idle.Reading{r}, LastUse: lastUse, Holder: "controller"}
	if consulted {
		report.Ordered = &control.AgentDone{Generation: is.Intent.Generation, Done: true, Answer: "proceed"}
	}
	w.f.c.Report(w.id, report)
}

// drawBursts returns use with gaps that are short, but long enough for a quiet
// window of CloudWatch.
func drawBursts(rng *rand.Rand, from, end time.Time) []truth.Span {
	between := func(least, most time.Duration) time.Duration {
		return (least + time.Duration(rng.Int64N(int64(most-least)))).Truncate(time.Second)
	}
	var spans []truth.Span
	for t := from; ; {
		t = t.Add(between(8*time.Minute, 20*time.Minute))
		to := t.Add(between(6*time.Minute, 25*time.Minute))
		if to.After(end) {
			return spans
		}
		spans = append(spans, truth.Span{From: t, To: to})
		t = to
	}
}

// episode lasts from the end of one use to the end of the next. CloudWatch is the
// only source, and the timeout is at some time shorter than the age of CloudWatch's
// newest window.
type episode struct {
	begin, end time.Time
	// From blind on, CloudWatch cannot be read: its newest known window is quiet, and
	// the next one, which shows the use, is missed. From short on, the timeout is so
	// short that a pause is due. A zero blind means no outage; a zero short means
	// short from the beginning.
	blind, short time.Time
	// If set, CloudWatch never publishes the windows that end in it, which show the
	// use. The timeout is short from short on.
	muted truth.Span
}

// plan draws an episode for most gaps between uses. It depends only on the uses,
// never on what lull does.
func (w *truthWorld) plan() {
	spans := w.use.Spans()
	for i, next := range spans[1:] {
		gap := next.From.Sub(spans[i].To)
		if gap < 6*time.Minute || gap > 55*time.Minute || w.rng.IntN(4) == 0 {
			continue
		}
		e := episode{begin: spans[i].To.Add(-5 * time.Second), end: next.To}
		used := next.From.Truncate(cloudWatchPeriod).Add(cloudWatchPeriod) // end of the first window with use
		for w.load(used.Add(-cloudWatchPeriod), used) < activeLoad && used.Before(next.To) {
			used = used.Add(cloudWatchPeriod)
		}
		seen, _, _ := resolution([]string{worker.SourceCloudWatch})
		if e.short = next.From.Add(seen + time.Minute); e.short.Before(next.To) && w.rng.IntN(2) == 0 {
			e.muted = truth.Span{From: next.From.Truncate(cloudWatchPeriod), To: next.To.Add(cloudWatchPeriod)}
		} else if e.short = (time.Time{}); w.rng.IntN(3) > 0 {
			e.blind = used.Add(-cloudWatchPeriod + w.lag + 80*time.Second)
			e.short = used.Add(w.lag + time.Duration(w.rng.IntN(40)-20)*time.Second)
		}
		w.episodes = append(w.episodes, e)
	}
}

// act carries out the steps that are due in the current episode. It reports whether
// an episode is in progress.
func (w *truthWorld) act(now time.Time) bool {
	if len(w.episodes) == 0 || now.Before(w.episodes[0].begin) {
		return false
	}
	reached := func(t *time.Time) bool {
		if t.IsZero() || now.Before(*t) {
			return false
		}
		*t = time.Time{}
		return true
	}
	e := &w.episodes[0]
	if !e.begin.IsZero() {
		e.begin = time.Time{}
		timeout := 2 * time.Minute
		if !e.short.IsZero() {
			timeout = time.Hour
		}
		w.configure(timeout, []string{worker.SourceCloudWatch})
		if w.muted = e.muted; w.muted != (truth.Span{}) {
			w.disturb(w.muted.To.Add(3 * cloudWatchPeriod).Sub(now))
		}
	}
	if reached(&e.blind) {
		w.fail("monitoring", e.short.Add(4*time.Minute).Sub(now), 0, w.rng.IntN(3))
	}
	if reached(&e.short) {
		w.configure(2*time.Minute, []string{worker.SourceCloudWatch})
	}
	if reached(&e.end) {
		w.episodes = w.episodes[1:]
		return false
	}
	return true
}

// change draws another timeout and other sources.
func (w *truthWorld) change() {
	all := []string{worker.SourceCML, worker.SourceCloudWatch, worker.SourceAgent}
	w.rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	minutes := []int{2, 5, 15, 30, 60}[w.rng.IntN(5)]
	needed := []int{1, 1, 1, 1, 2, 3}[w.rng.IntN(6)]
	if time.Now().Before(w.consoles) {
		all, needed = []string{worker.SourceCML}, 1
	}
	w.configure(time.Duration(minutes)*time.Minute, slices.Sorted(slices.Values(all[:needed])))
}

func (w *truthWorld) configure(timeout time.Duration, sources []string) {
	w.set(timeout, sources)
	minutes := int(timeout.Minutes())
	if _, err := w.f.fleet.UpdateWorker(w.t.Context(), operator, w.id, 0, worker.Profile{IdleTimeoutMinutes: &minutes, ActivitySources: w.sources}); err != nil {
		w.t.Errorf("cannot change the worker: %v", err)
	}
	w.disturb(0)
}

func (w *truthWorld) set(timeout time.Duration, sources []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.old.sources, w.old.timeout, w.old.until = w.sources, w.timeout, time.Now().Add(finalCheck+time.Second)
	w.sources, w.timeout = sources, timeout
}

// outage makes one service, drawn at random, fail for d.
func (w *truthWorld) outage(d time.Duration) {
	w.fail([]string{"ec2", "cml", "monitoring"}[w.rng.IntN(3)], d, []float64{0, 0.3}[w.rng.IntN(2)], w.rng.IntN(4))
}

// fail makes a share of a service's answers fail for d, in one of four ways; the last
// way only delays them. A share of 0 means all answers.
func (w *truthWorld) fail(service string, d time.Duration, share float64, way int) {
	now := time.Now()
	rule := fault.Rule{Service: service, From: now, Until: now.Add(d), Probability: share}
	switch way {
	case 0:
		rule.Kind, rule.Code, rule.Status = fault.Error, "InternalError", 503
	case 1:
		rule.Kind = fault.Hang
	case 2:
		rule.Kind = fault.Lose
	default:
		rule.Kind, rule.Delay = fault.Delay, time.Second+time.Duration(w.rng.Int64N(int64(20*time.Second)))
	}
	if _, err := w.f.sim.World.Faults.Add(rule); err != nil {
		w.t.Fatal(err)
	}
	w.disturb(d)
}

// disturb notes that for d from now, an idle machine may be stopped later than usual.
func (w *truthWorld) disturb(d time.Duration) {
	if at := time.Now().Add(d); at.After(w.disturbed) {
		w.disturbed = at
	}
}

// missed fails the test if an idle machine was left running although there is no
// fault.
func (w *truthWorld) missed(now time.Time) {
	since, up := w.up()
	last, was := w.use.Last(now)
	if !up || was && last.Equal(now) {
		return
	}
	from := since.Add(w.snooze)
	for _, t := range []time.Time{last, w.disturbed} {
		if t.After(from) {
			from = t
		}
	}
	// After a lost window or report, quiet time starts anew, and CloudWatch's own
	// resolution comes on top.
	bound := w.timeout + 2*cloudWatchPeriod + w.lag + 10*time.Minute
	if w.loss == 0 || !slices.Contains(w.sources, worker.SourceCloudWatch) {
		if idle := now.Sub(from); idle > bound {
			w.t.Errorf("%s, timeout %s, sources %v: idle and undisturbed for %s and still running: %v", w.about, w.timeout, w.sources, idle, w.blocks())
			w.disturb(time.Hour) // report it once
		}
	}
}

func (w *truthWorld) blocks() []string {
	var out []string
	if l, ok := w.f.c.Live(w.id); ok && l.Idle != nil {
		for _, b := range l.Idle.Blocks {
			out = append(out, string(b.Code)+": "+b.Sentence)
		}
	}
	return out
}

package controller_test

import (
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/controller"
	"lull/internal/core/power"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	simworld "lull/internal/sim/world"
)

// actingCalls is a front of the simulator that disturbs calls that stop or terminate:
// it answers with errors, throttles, hangs, is slow, or does the work and loses the
// answer. It records when each request arrived and when the CML of each host last
// answered.
type actingCalls struct {
	t *testing.T

	mu      sync.Mutex
	rng     *rand.Rand
	hosts   map[string]string // EC2 instance by address
	checked map[string]time.Time
	sent    map[string][]acting // by instance
	// While slow is not nil, all such requests fail. The first request of a call that
	// begins just after a renewal of the lease is caught: slow receives, and the
	// request fails only after caught. Its retries would then come too late if only
	// the lease ended them.
	slow  chan struct{}
	lease func() time.Duration // the time left of the controller's lease
	bad   map[string]int
}

// caught is how long a caught request takes to fail: longer than calls may go on
// after a halt.
const caught = 5100 * time.Millisecond

type acting struct {
	call    string
	at      time.Time
	checked time.Time // when CML last answered before the request
}

func (a *actingCalls) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	if strings.HasSuffix(r.URL.Path, "/telemetry/events") {
		next.ServeHTTP(w, r)
		a.mu.Lock()
		defer a.mu.Unlock()
		a.checked[a.hosts[r.Host]] = time.Now()
		return
	}
	if r.Method != http.MethodPost || r.URL.Path != "/" {
		next.ServeHTTP(w, r)
		return
	}
	form := formOf(r)
	call := strings.Join(form["Action"], "")
	if call != "StopInstances" && call != "TerminateInstances" {
		next.ServeHTTP(w, r)
		return
	}
	a.mu.Lock()
	for n := 1; len(form["InstanceId."+strconv.Itoa(n)]) > 0; n++ {
		id := form["InstanceId."+strconv.Itoa(n)][0]
		a.sent[id] = append(a.sent[id], acting{call, time.Now(), a.checked[id]})
	}
	how := []string{"500", "throttled", "hangs", "lost", "slow", "well"}[a.rng.IntN(6)]
	wait := time.Duration(a.rng.IntN(4000)) * time.Millisecond
	if a.slow != nil {
		how, wait = "500", 0
		if strings.Contains(r.Header.Get("Amz-Sdk-Request"), "attempt=1;") && a.lease() > controller.LeaseTTL-time.Second {
			select {
			case a.slow <- struct{}{}:
				how, wait = "slow", caught
			default: // one caught request is enough
			}
		}
	}
	a.bad[how]++
	a.mu.Unlock()
	refuse := func(status int, code string) {
		w.WriteHeader(status)
		_, _ = w.Write([]byte(`<Response><Errors><Error><Code>` + code + `</Code><Message>no</Message></Error></Errors><RequestID>r</RequestID></Response>`))
	}
	switch how {
	case "500":
		refuse(500, "InternalError")
	case "throttled":
		refuse(503, "RequestLimitExceeded")
	case "hangs":
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	case "lost":
		panic(http.ErrAbortHandler)
	case "slow":
		select {
		case <-time.After(wait):
		case <-r.Context().Done():
		}
		refuse(500, "InternalError")
	default:
		next.ServeHTTP(w, r)
	}
}

// TestStopIsNeverSentLate checks that no request that stops an idle worker arrives
// later than 5 s after CML was last read for it, however EC2 answers. That includes
// retries of the SDK and a hibernation that falls back to a stop.
func TestStopIsNeverSentLate(t *testing.T) {
	t.Setenv("AWS_ENDPOINT_URL", "http://cloud")
	n := max(scaletest.N(t, 12), 2) // names are numbered only from two instances on
	rng := scaletest.Random(t)
	synctest.Test(t, func(t *testing.T) {
		a := newActingCalls(t, rng)
		f := newSimFleet(t, idleScenario(n), map[string]any{
			"worker_idle_timeout_minutes": 30, "worker_warn_before_minutes": 1, "idle_detection_interval": 60, "worker_activity_detection_interval": 300,
		}, a.serve)
		ids := a.adopt(f, n, func(i int) worker.Profile {
			action := []string{worker.ActionStop, worker.ActionHibernate}[i%2]
			return worker.Profile{PauseAction: &action, AcceptedRisks: []string{worker.RiskNoElasticIP}}
		})
		f.start()
		for end := time.Now().Add(12 * time.Hour); ; time.Sleep(time.Minute) {
			left := 0
			for _, id := range ids {
				if f.worker(id).Status != power.WorkerStopped {
					left++
				}
			}
			if left == 0 {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("%d of %d workers are not stopped after 12 h", left, n)
			}
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		requests := 0
		for id, sent := range a.sent {
			for _, s := range sent {
				requests++
				if late := s.at.Sub(s.checked); s.checked.IsZero() || late > 5*time.Second {
					t.Errorf("%s of %s arrived %s after CML's last answer", s.call, id, late)
				}
			}
		}
		t.Logf("%d requests for %d workers, answered: %v", requests, n, a.bad)
		if requests <= n {
			t.Error("no call was repeated")
		}
	})
}

// TestHaltEndsRetries checks that no stop or termination for an expired deadline
// arrives later than 5 s after a halt was acknowledged.
func TestHaltEndsRetries(t *testing.T) {
	t.Setenv("AWS_ENDPOINT_URL", "http://cloud")
	n := max(scaletest.N(t, 12), 2) // names are numbered only from two instances on
	rng := scaletest.Random(t)
	synctest.Test(t, func(t *testing.T) {
		a := newActingCalls(t, rng)
		f := newSimFleet(t, idleScenario(n), map[string]any{"worker_auto_pause_enabled": false}, a.serve)
		end := time.Now().Add(20 * time.Minute)
		a.adopt(f, n, func(i int) worker.Profile {
			action := []string{worker.ActionStop, "terminate"}[i%2]
			return worker.Profile{TTLDeadline: &end, TTLAction: &action}
		})
		f.start()
		a.lease = func() time.Duration { return time.Duration(f.c.Leadership().Lease * float64(time.Second)) }
		time.Sleep(time.Until(end))
		calls := 0
		for round := range 20 { // halt at various moments, then lift the halt
			if round < 3 {
				// Halt while a request is caught. Its retry would come too late if
				// the halt did not end it.
				arrived := make(chan struct{}, 1)
				a.mu.Lock()
				a.slow = arrived
				a.mu.Unlock()
				select {
				case <-arrived:
				case <-time.After(time.Hour):
					t.Fatal("no call was made")
				}
			} else {
				time.Sleep(time.Duration(rng.IntN(20000)) * time.Millisecond)
			}
			errtest.Get(f.fleet.SetHalt(t.Context(), operator, halt.Request{On: true}))(t)
			halted := time.Now()
			time.Sleep(2 * time.Minute)
			a.mu.Lock()
			a.slow = nil
			calls = 0
			for id, sent := range a.sent {
				calls += len(sent)
				for _, s := range sent {
					if late := s.at.Sub(halted); late > 5*time.Second {
						t.Errorf("%s of %s arrived %s after the halt", s.call, id, late)
					}
				}
			}
			a.mu.Unlock()
			errtest.Get(f.fleet.SetHalt(t.Context(), operator, halt.Request{}))(t)
		}
		if calls == 0 {
			t.Error("no call was made")
		}
	})
}

func newActingCalls(t *testing.T, rng *rand.Rand) *actingCalls {
	return &actingCalls{t: t, rng: rng, hosts: map[string]string{}, checked: map[string]time.Time{}, sent: map[string][]acting{}, bad: map[string]int{}}
}

// adopt imports the scenario's instances as workers, with the profiles that p
// returns.
func (a *actingCalls) adopt(f *simFleet, n int, p func(i int) worker.Profile) (ids []string) {
	for i := range n {
		name := "m-" + strconv.Itoa(i+1)
		ids = append(ids, f.adopt(name, p(i)).ID)
		f.sim.World.Locate(name, func(in *simworld.Instance, _ simworld.Moment) { a.hosts[in.PrivateIP.String()] = in.ID })
	}
	return ids
}

// idleScenario returns a region of n unused CML workers.
func idleScenario(n int) simworld.Config {
	return simworld.Config{
		Regions:  []simworld.RegionConfig{{Name: simRegion}},
		Timing:   simworld.Timing{Background: -1},
		Profiles: map[string]simworld.Profile{"quiet": {}},
		Workers:  []simworld.WorkerConfig{{Name: "m", Count: n, Type: "t3.small", Profile: "quiet"}},
	}
}

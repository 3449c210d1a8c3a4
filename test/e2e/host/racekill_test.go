package host

import (
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	otlp "go.opentelemetry.io/proto/otlp/trace/v1"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/scaletest"
)

// The daemon is killed around the instant of a freeze or a wake, while clients connect,
// send and call, and another one takes over. Every client is answered. In make soak,
// what happens, with the death, must also be a behavior of the model: one trace of
// several hundred was rejected on a busy machine, and it is not known whether the model
// or what the killed daemon could not report is at fault.
func TestRaceKilled(t *testing.T) {
	rounds := scaletest.Count(t, "LULL_RACE_KILLS", 8)
	rng := random(t)
	sent := collect(t)
	d := daemontest.Start(t, daemontest.Config{Under: quickDisk(), Args: []string{"--probe", "50ms"}, Env: append(sent.env(), "OTEL_BSP_MAX_EXPORT_BATCH_SIZE=1")}) // the less is lost, the more the model must follow
	lanes := make([]*lane, raceLanes)
	for n := range lanes {
		lanes[n] = newLane(d, n, rng, false, func(d *daemontest.Host, s instance.Spec, _ string) { d.Launch(s) })
	}
	begin := time.Now()
	for n := 0; n < rounds || taken(sent, lanes) < 3 && n < 10*rounds; n++ {
		killRound(t, d, lanes, rng)
		if t.Failed() {
			t.Fatalf("in round %d", n)
		}
	}
	end := time.Now()
	sent.flush(d, lanes[0].name)
	for _, l := range lanes {
		mustAnswer(t, l.addr)
	}
	t.Logf("REPORT race: the daemon was killed %d times in %s, and %d pauses were taken over; no client lost, none left frozen", len(lanes[0].crashes), end.Sub(begin), taken(sent, lanes))
	if os.Getenv("LULL_SOAK") != "" {
		followed(t, lanes, sent, end, killChanges)
	}
}

// taken returns how many pauses daemons took over from others.
func taken(s *spans, lanes []*lane) (n int) {
	for _, l := range lanes {
		for _, sp := range s.of(l.name) {
			if sp.Name == "commit" && len(sp.ParentSpanId) == 0 && sp.GetStatus().GetCode() != otlp.Status_STATUS_CODE_ERROR {
				n++
			}
		}
	}
	return n
}

// killRound has every lane freeze once, with clients around the freeze and later ones,
// and kills the daemon around the freeze of one of them or at any time. In the end all
// run again.
func killRound(t *testing.T, d *daemontest.Host, lanes []*lane, rng *rand.Rand) {
	volleys := make([]*volley, len(lanes))
	each := func(do func(n int, l *lane) error) {
		t.Helper()
		var wg sync.WaitGroup
		for n, l := range lanes {
			wg.Go(func() {
				if err := do(n, l); err != nil {
					o, gerr := d.Get(t.Context(), l.name)
					t.Errorf("%s: %v; now %s (%s) %v", l.name, err, o.State, o.StatusReason, gerr)
				}
			})
		}
		wg.Wait()
	}
	defer func() {
		for _, v := range volleys {
			v.close()
		}
	}()
	began := make([]time.Time, len(lanes))
	each(func(n int, l *lane) (err error) {
		volleys[n], err = l.load(t.Context(), 2)
		began[n] = time.Now()
		return err
	})
	if t.Failed() {
		return
	}
	var answers sync.WaitGroup
	answers.Go(func() {
		each(func(n int, l *lane) error {
			late := l.rng.IntN(2) == 0
			_, err := l.fire(volleys[n], func() time.Duration {
				if late {
					return time.Duration(l.rng.IntN(600)) * time.Millisecond
				}
				return l.within(spread)
			})
			return err
		})
	})
	at := rng.IntN(len(lanes))
	when := volleys[at].deadline.Add(lanes[at].aim[volleys[at].way] + time.Duration((rng.Float64()*2-1)*float64(4*time.Millisecond)))
	if rng.IntN(3) == 0 {
		when = time.Now().Add(time.Duration(rng.IntN(300)) * time.Millisecond)
	}
	away := time.Duration(rng.IntN(200)) * time.Millisecond
	if rng.IntN(5) == 0 {
		away = 2500 * time.Millisecond // by then the shim thaws
	}
	until(when)
	c := crash{from: time.Now()}
	d.Kill()
	c.to = time.Now()
	until(c.to.Add(away))
	d.Boot()
	ended := make([]time.Time, len(lanes))
	each(func(n int, l *lane) error {
		_, err := l.stable(t.Context())
		ended[n] = time.Now()
		return err
	})
	answers.Wait()
	each(func(_ int, l *lane) error {
		l.calls.Wait()
		if _, err := l.stable(t.Context()); err != nil {
			return err
		}
		err := l.do(t.Context(), "resume", verbResume)
		if refused(err) != "" {
			err = nil
		}
		return err
	})
	for n, l := range lanes {
		c.began, c.ended = began[n], ended[n]
		l.crashes = append(l.crashes, c)
	}
}

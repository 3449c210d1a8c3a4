package corpus

import (
	"time"

	"lull/internal/fleet/worker"
)

// atWork adds a user at work in CML, who performs an action every few minutes, at
// most longest apart.
func (b *builder) atWork(user string, from, to, longest time.Duration) {
	kinds := []string{"start_node", "stop_node", "user_activity", "start_lab", "queue_node", "boot_node", "user_activity", "wipe_node"}
	for t := from; t < to; t += b.between(20*time.Second, longest) {
		b.events = append(b.events, event{t, kinds[b.rng.IntN(len(kinds))], user})
	}
	b.did(use, from, to, worker.SourceCML)
}

// runs adds a lab whose nodes run, whether or not a user is at work.
func (b *builder) runs(from, to time.Duration, share float64) {
	b.lab = append(b.lab, load{from: from, to: to, scale: share})
}

// fleetScenarios are the kinds of days of a fleet's workers.
func fleetScenarios() []scenario {
	const pause = 14 * time.Minute
	on := func(name string, write func(b *builder)) scenario {
		return scenario{name, "fleet", "", func(b *builder) { b.sources = []string{worker.SourceCML}; write(b) }}
	}
	sessions := func(b *builder, user string, share float64) {
		for _, s := range b.sessions() {
			b.atWork(user, s[0], s[1], pause)
			b.runs(s[0], s[1], share)
		}
	}
	return []scenario{
		on("engineer", func(b *builder) { sessions(b, "anna", 0.2) }),
		on("two engineers", func(b *builder) { sessions(b, "anna", 0.2); sessions(b, "bo", 0.2) }),
		on("lab left running", func(b *builder) {
			sessions(b, "anna", 0.2)
			b.runs(b.sessions()[1][1], day, 0.3) // without a user
		}),
		on("lab left running since yesterday", func(b *builder) { b.runs(0, day, 0.4) }),
		on("class", func(b *builder) {
			from := b.between(hm(8, 0), hm(9, 30))
			for _, user := range []string{"s1", "s2", "s3", "s4", "s5"} {
				b.atWork(user, from+b.between(0, 10*time.Minute), from+b.between(hm(2, 0), hm(4, 0)), pause)
			}
			b.runs(from, from+hm(4, 0), 0.6)
		}),
		on("evening student", func(b *builder) {
			from := b.between(hm(18, 0), hm(20, 0))
			b.atWork("dan", from, from+b.between(hm(1, 0), hm(3, 30)), pause)
		}),
		on("night shift", func(b *builder) {
			b.atWork("eve", 0, b.between(hm(2, 0), hm(5, 0)), pause)
			b.atWork("eve", b.between(hm(21, 0), hm(22, 0)), day, pause)
		}),
		on("nightly test of topologies", func(b *builder) {
			for _, v := range b.moments(2, hm(1, 0), hm(6, 0), 20*time.Minute, 70*time.Minute) {
				b.atWork("ci", v[0], v[1], 5*time.Minute)
				b.runs(v[0], v[1], 0.7)
			}
		}),
		on("demo", func(b *builder) {
			for _, v := range b.moments(2, hm(9, 0), hm(17, 0), 20*time.Minute, 50*time.Minute) {
				b.atWork("fay", v[0], v[1], 6*time.Minute)
			}
		}),
		on("forgotten", func(b *builder) {}),
		on("only the administrator's scripts", func(b *builder) {
			for t := b.between(0, 20*time.Minute); t < day; t += 20 * time.Minute {
				b.events = append(b.events, event{t, "user_activity", "admin"})
			}
		}),
		on("soak test under a snooze", func(b *builder) {
			s := b.sessions()
			b.atWork("anna", s[0][0], s[0][1], pause)
			to := s[0][1] + b.between(hm(4, 0), hm(8, 0))
			b.snoozes = append(b.snoozes, load{from: s[0][1] - time.Minute, to: to})
			b.runs(s[0][1], to, 0.5)
			b.did(use, s[0][1], to, "snooze")
		}),
		on("soak test that CloudWatch sees", func(b *builder) {
			b.sources = []string{worker.SourceCloudWatch, worker.SourceCML}
			s := b.sessions()
			b.atWork("anna", s[0][0], s[0][1], pause)
			to := s[0][1] + b.between(hm(3, 0), hm(9, 0))
			b.runs(s[0][0], to, 0.3)
			b.did(use, s[0][0], to, worker.SourceCloudWatch)
		}),
		on("engineer with CloudWatch", func(b *builder) {
			b.sources = []string{worker.SourceCloudWatch, worker.SourceCML}
			sessions(b, "anna", 0.2)
			for _, a := range b.acts {
				b.did(idleLabel, a.from, a.to, worker.SourceCloudWatch)
			}
		}),
		on("unused with CloudWatch", func(b *builder) {
			b.sources = []string{worker.SourceCloudWatch, worker.SourceCML}
			for t := b.between(0, time.Hour); t < day; t += time.Hour { // hourly jobs
				b.runs(t, t+10*time.Second, 0.5)
			}
		}),
		on("visits", func(b *builder) {
			for _, v := range b.moments(4, hm(7, 0), hm(22, 0), 2*time.Minute, 20*time.Minute) {
				b.atWork("guest", v[0], v[1], 3*time.Minute)
			}
		}),
	}
}

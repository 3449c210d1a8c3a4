package corpus

import "time"

// shell adds a user in an SSH session, who types with pauses of at most longest.
// The session stays open until the time until.
func (b *builder) shell(terminal int, from, to, until, longest time.Duration) {
	b.logins = append(b.logins, login{from, max(to, until), terminal})
	b.did(use, from, to, "terminals", "users", "recent", "network", "cpu", "disk")
	b.did(idleLabel, from, max(to, until)+step, "terminals", "users") // the prompt at its beginning, and its end
	c := conn{from: from, to: max(to, until)}
	for t := from; t < to; {
		typed := min(t+b.between(20*time.Second, 8*time.Minute), to)
		b.keys = append(b.keys, keys{t, typed, terminal, b.between(300*time.Millisecond, 4*time.Second)})
		b.flows = append(b.flows, flow{t, typed, 150})
		c.request(t, time.Second, 200, 2000)
		b.play(t, typed, "shell-type")
		t = typed + b.between(10*time.Second, longest)
	}
	// The session's keep-alives: one every 30 s in each direction.
	b.flows = append(b.flows, flow{from, c.to, 8})
	b.conns = append(b.conns, c)
}

// asked adds a client that sends requests on one connection at an interval. It is
// for rules that count requests; its bytes are part of the recording.
func (b *builder) asked(from, to, every time.Duration) {
	c := conn{from: from, to: to}
	for t := from; t < to; t += every {
		c.request(t, time.Millisecond, 500, 2000)
	}
	b.conns = append(b.conns, c)
}

// background adds the machine's own programs, whose work is not use.
func (b *builder) background() {
	b.base = "prometheus"
	b.flows = append(b.flows, flow{0, day, 40}) // ARP, DHCP, NTP, a scrape
	cron := func(every, length time.Duration, block string, scale float64) {
		for t := b.between(time.Minute, every); t < day; t += every {
			b.loads = append(b.loads, load{from: t, to: t + length, block: block, scale: scale, quiet: true})
			b.did(idleLabel, t, t+length, "cpu", "disk")
		}
	}
	cron(time.Hour, 2*time.Second, "build-c", 0.5)                    // hourly jobs
	cron(day, b.between(10*time.Second, 50*time.Second), "backup", 1) // log rotation, once a day
}

// machineScenarios returns the kinds of days of machines with an agent.
func machineScenarios() []scenario {
	const pause = 12 * time.Minute // longest pause during work
	on := func(name string, write func(b *builder)) scenario {
		return scenario{name, "agent", "", func(b *builder) { b.background(); write(b) }}
	}
	work := func(b *builder, block string, shows ...string) {
		for i, s := range b.sessions() {
			b.shell(i, s[0], s[1], 0, pause)
			for _, v := range b.moments(4, s[0], s[1], time.Minute, 12*time.Minute) {
				b.works(v[0], v[1], block, shows...)
			}
		}
	}
	return []scenario{
		on("developer with an editor", func(b *builder) { work(b, "tsserver-edit", "cpu", "disk") }),
		on("developer who builds", func(b *builder) { work(b, []string{"build-go", "build-c"}[b.rng.IntN(2)], "cpu", "disk") }),
		on("writer in vim", func(b *builder) {
			for i, s := range b.sessions() {
				b.shell(i, s[0], s[1], 0, pause)
				b.play(s[0], s[1], "vim-type")
			}
		}),
		on("SSH left open", func(b *builder) {
			s := b.sessions()
			b.shell(0, s[0][0], s[0][1], day, pause)
			b.shell(1, s[1][0], s[1][1], day, pause)
		}),
		on("tmux left with a log", func(b *builder) {
			s := b.sessions()[0]
			b.shell(0, s[0], s[1], day, pause)
			// From time to time, the log that the user follows gets a line
			// without any use.
			for t := s[1]; t < day; t += b.between(20*time.Minute, 3*time.Hour) {
				b.keys = append(b.keys, keys{from: t, to: t, terminal: 0})
				b.did(idleLabel, t, t+step, "terminals")
			}
		}),
		on("night training", func(b *builder) {
			s := b.sessions()
			b.shell(0, s[1][0], s[1][1], 0, pause)
			b.works(s[1][1]-time.Minute, s[1][1]+b.between(hm(3, 0), hm(5, 0)), "train", "cpu", "disk")
		}),
		on("GPU training", func(b *builder) {
			s := b.sessions()[0]
			b.shell(0, s[0], s[1], 0, pause)
			to := s[1] + b.between(hm(3, 0), hm(9, 0))
			b.gpu = append(b.gpu, load{from: s[1] - time.Minute, to: to, scale: 0.3 + 0.6*b.rng.Float64()})
			b.did(use, s[1]-time.Minute, to, "gpu")
		}),
		on("GPU idle", func(b *builder) {
			b.gpu = append(b.gpu, load{from: 0, to: 1, scale: 0})
			for i, s := range b.sessions() {
				b.shell(i, s[0], s[1], 0, pause)
			}
		}),
		on("CI runner", func(b *builder) {
			for _, v := range b.moments(5, hm(7, 0), hm(22, 0), 4*time.Minute, 40*time.Minute) {
				b.works(v[0], v[1], []string{"build-c", "build-go"}[b.rng.IntN(2)], "cpu", "disk")
				b.flows = append(b.flows, flow{v[0], v[1], 5000})
				b.did(use, v[0], v[1], "network")
			}
		}),
		on("notebook machine", func(b *builder) {
			b.base = "prometheus"
			b.play(0, 2*day, "jupyter-idle")
			for _, s := range b.sessions() {
				b.flows = append(b.flows, flow{s[0], s[1], 1500}) // traffic of a browser
				b.did(use, s[0], s[1], "network", "cpu", "disk")
				b.play(s[0], s[1], "jupyter-tab")
				b.asked(s[0], s[1], 10*time.Second)
				for _, v := range b.moments(2, s[0], s[1], 2*time.Minute, 20*time.Minute) {
					b.works(v[0], v[1], "train", "cpu", "disk")
				}
			}
		}),
		on("database server", func(b *builder) {
			b.play(0, 2*day, "postgres-idle")
			for _, s := range b.sessions() {
				b.works(s[0], s[1], "postgres-busy", "disk", "network", "cpu")
				b.asked(s[0], s[1], time.Minute)
			}
		}),
		on("health-checked and unused", func(b *builder) {
			b.play(0, 2*day, "nginx-health")
			b.flows = append(b.flows, flow{0, day, 60})
			for t := time.Duration(0); t < day; t += 30 * time.Second {
				c := conn{from: t, to: t + 20*time.Millisecond}
				c.request(t, time.Millisecond, 90, 120)
				b.conns = append(b.conns, c)
			}
		}),
		on("forgotten machine", func(b *builder) {}),
		on("file transfers", func(b *builder) {
			for _, v := range b.moments(3, hm(6, 0), hm(23, 0), 3*time.Minute, 80*time.Minute) {
				b.flows = append(b.flows, flow{v[0], v[1], float64(b.amount(2000, 2_000_000))})
				b.did(use, v[0], v[1], "network")
				c := conn{from: v[0], to: v[1]}
				c.request(v[0], time.Second, 500, 1<<20)
				b.conns = append(b.conns, c)
			}
		}),
		on("game server", func(b *builder) {
			b.play(0, 2*day, "game-idle")
			for _, v := range b.moments(2, hm(14, 0), hm(23, 30), 30*time.Minute, 2*time.Hour) {
				b.works(v[0], v[1], "game-busy", "network", "cpu")
				b.asked(v[0], v[1], 10*time.Second)
			}
		}),
		on("nightly backup by its own timer", func(b *builder) {
			for i, s := range b.sessions() {
				b.shell(i, s[0], s[1], 0, pause)
			}
			from := b.between(hm(2, 0), hm(4, 0))
			to := from + b.between(10*time.Minute, 30*time.Minute)
			b.play(from, to, "backup")
			b.acts = append(b.acts, act{from: from, to: to, label: use, shows: []string{"cpu", "disk"}, timer: true})
		}),
		on("agents on a machine", func(b *builder) {
			for _, v := range b.moments(4, hm(8, 0), hm(22, 0), 15*time.Minute, 90*time.Minute) {
				b.did(use, v[0], v[1], "network", "cpu", "disk")
				b.play(v[0], v[1], "agent-api")
				b.flows = append(b.flows, flow{v[0], v[1], 900})
			}
		}),
		on("simulation in memory", func(b *builder) {
			for _, v := range b.moments(2, hm(2, 0), hm(22, 0), hm(0, 40), hm(3, 0)) {
				b.did(use, v[0], v[1], "cpu")
				b.loads = append(b.loads, load{from: v[0], to: v[1], block: "build-c", scale: 3, memory: true, quiet: true})
			}
		}),
		on("data analysis", func(b *builder) { work(b, "train", "cpu", "disk") }),
		on("chat server", func(b *builder) {
			b.play(0, 2*day, "chat-idle")
			for _, v := range b.moments(3, hm(8, 0), hm(23, 0), 20*time.Minute, 90*time.Minute) {
				b.works(v[0], v[1], "chat-busy", "network", "cpu")
				b.flows = append(b.flows, flow{v[0], v[1], 600})
				b.asked(v[0], v[1], 10*time.Second)
			}
		}),
		on("class in the morning", func(b *builder) {
			from := b.between(hm(8, 0), hm(9, 0))
			for n := range 4 {
				b.shell(n, from+b.between(0, 10*time.Minute), from+b.between(hm(1, 30), hm(3, 0)), 0, pause)
			}
		}),
	}
}

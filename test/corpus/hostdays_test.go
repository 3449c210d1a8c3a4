package corpus

import "time"

// thinks is how long after an answer a visitor may make the next request. The use
// continues until then.
const thinks = 30 * time.Second

// request adds a message from the client and the program's answer.
func (c *conn) request(at, took time.Duration, in, out int) {
	c.messages = append(c.messages, message{at, true, in})
	if out > 0 {
		c.messages = append(c.messages, message{at + took, false, out})
	}
}

// visit adds a user with a browser, who makes requests on connections that the
// server keeps open for a while.
func (b *builder) visit(from, to, least, most, keep time.Duration, busy string) {
	var c *conn
	end := func() {
		if c != nil {
			b.did(held, c.from, c.to, "connections")
			b.conns = append(b.conns, *c)
		}
	}
	for t := from; t < to; t += b.between(least, most) {
		took := b.between(5*time.Millisecond, 400*time.Millisecond)
		if c == nil || t >= c.to {
			end()
			c = &conn{from: t, closes: true}
		}
		c.request(t, took, b.amount(300, 2000), b.amount(500, 200_000))
		c.to = t + took + keep
		b.did(use, t, t+took+thinks, "connections", "net", "cpu", "disk")
		b.play(t, t+took+2*time.Second, busy)
	}
	end()
}

// session adds a client that communicates on one connection, and leaves it open
// until the time until.
func (b *builder) session(from, to, until, least, most time.Duration, in, out int, busy string) {
	c := conn{from: from, to: max(to, until)}
	for t := from; t < to; t += b.between(least, most) {
		c.request(t, b.between(time.Millisecond, 30*time.Millisecond), in, out)
	}
	b.conns = append(b.conns, c)
	b.did(held, c.from, c.to, "connections", "net")
	b.did(use, from, to, "connections", "net", "cpu", "disk")
	b.play(from, to, busy)
}

// pinged adds a connection without a user, on which one side sends a message at
// an interval and the other answers. out means that the program opened it.
func (b *builder) pinged(from, to, every time.Duration, out bool, bytes int) {
	c := conn{from: from, to: to, out: out}
	for t := from; t < to; t += b.between(every, every+every/50) {
		c.messages = append(c.messages, message{t, !out, bytes}, message{t + 2*time.Millisecond, out, bytes})
	}
	b.conns = append(b.conns, c)
	shows := "connections"
	if out {
		shows = "tcp"
	}
	b.did(held, from, to, shows, "net", "cpu")
}

// probed adds a health check, which connects, sends a request and closes.
func (b *builder) probed(from, to, every time.Duration) {
	closes := b.chance(0.5)
	for t := from; t < to; t += every {
		c := conn{from: t, to: t + 20*time.Millisecond, closes: closes}
		c.request(t, 10*time.Millisecond, 90, 120)
		b.conns = append(b.conns, c)
	}
	b.did(held, from, to, "connections", "net", "cpu")
}

// task adds a request whose work continues after the answer.
func (b *builder) task(from time.Duration) {
	c := conn{from: from, to: from + 200*time.Millisecond}
	c.request(from, 100*time.Millisecond, 2000, 300)
	b.conns = append(b.conns, c)
	b.did(use, from, from+200*time.Millisecond, "connections", "net")
}

// works plays a recording of work that no client caused. shows are the signals
// that can show it.
func (b *builder) works(from, to time.Duration, block string, shows ...string) {
	b.did(use, from, to, shows...)
	b.play(from, to, block)
}

// thinksWithModel adds an agent, which calls a model, waits for the answer, and
// runs a tool.
func (b *builder) thinksWithModel(from, to, least, most time.Duration) {
	b.did(use, from, to, "tcp", "net", "cpu", "disk")
	for t := from; t < to; {
		answered := min(t+b.between(least, most), to)
		c := conn{from: t, to: answered, out: true, messages: []message{{t + 50*time.Millisecond, false, 30_000}}}
		for at := answered - 3*time.Second; at < answered; at += 50 * time.Millisecond {
			c.messages = append(c.messages, message{max(at, t+time.Second), true, 60})
		}
		b.conns = append(b.conns, c)
		tool := min(answered+b.between(time.Second, 8*time.Second), to)
		b.loads = append(b.loads, load{from: answered, to: tool, block: "build-c", shift: b.between(0, time.Minute)})
		t = tool
	}
}

// hostScenarios returns the kinds of days of host instances.
func hostScenarios() []scenario {
	site := func(name, base, busy string, keep time.Duration) scenario {
		return scenario{name, "host", base, func(b *builder) {
			for _, s := range b.sessions() {
				for _, v := range b.moments(3, s[0], s[1], 3*time.Minute, 25*time.Minute) {
					b.visit(v[0], v[1], 2*time.Second, 25*time.Second, keep, busy)
				}
			}
		}}
	}
	return []scenario{
		site("website", "nginx-idle", "nginx-visit", 75*time.Second),
		site("node app", "node-idle", "node-visit", 5*time.Second),
		site("java service", "java-idle", "java-visit", 30*time.Second),
		site("python app", "gunicorn-idle", "gunicorn-visit", 0),
		{"rarely read site", "host", "nginx-idle", func(b *builder) {
			for _, v := range b.moments(8, 0, day, time.Second, 90*time.Second) {
				b.visit(v[0], v[1], 10*time.Second, 4*time.Minute, 75*time.Second, "nginx-visit")
			}
		}},
		{"health-checked service", "host", "nginx-idle", func(b *builder) {
			b.probed(0, day, 10*time.Second)
			for _, v := range b.moments(6, hm(8, 0), hm(20, 0), time.Minute, 10*time.Minute) {
				b.visit(v[0], v[1], 2*time.Second, 20*time.Second, 75*time.Second, "nginx-visit")
			}
		}},
		{"cache", "host", "redis-idle", func(b *builder) {
			for _, s := range b.sessions() {
				for _, v := range b.moments(4, s[0], s[1], time.Minute, 12*time.Minute) {
					b.session(v[0], v[1], 0, 50*time.Millisecond, 3*time.Second, 40, 400, "redis-busy")
				}
			}
		}},
		{"database", "host", "postgres-idle", func(b *builder) {
			for _, s := range b.sessions() {
				for _, v := range b.moments(2, s[0], s[1], 5*time.Minute, 25*time.Minute) {
					b.session(v[0], v[1], 0, 100*time.Millisecond, 20*time.Second, 200, 3000, "postgres-busy")
				}
			}
		}},
		{"pooled database", "host", "postgres-idle", func(b *builder) {
			up := b.between(hm(7, 0), hm(8, 0))
			every := []time.Duration{4 * time.Hour, 30 * time.Second}[b.rng.IntN(2)] // with or without a periodic query
			for range 3 {
				b.pinged(up, hm(19, 0), every, false, 60)
			}
			for _, s := range b.sessions() {
				b.session(s[0], s[1], 0, 200*time.Millisecond, 15*time.Second, 200, 3000, "postgres-busy")
			}
		}},
		{"slow query", "host", "postgres-idle", func(b *builder) {
			for _, v := range b.moments(6, hm(7, 0), hm(21, 0), 4*time.Minute, 35*time.Minute) {
				c := conn{from: v[0], to: v[1]}
				c.request(v[0], v[1]-v[0]-time.Millisecond, 500, 20_000)
				b.conns = append(b.conns, c)
				b.did(use, v[0], v[1], "connections", "cpu", "disk", "net")
			}
		}},
		{"chat server", "host", "chat-idle", func(b *builder) {
			for _, v := range b.moments(3, hm(9, 0), hm(23, 0), 10*time.Minute, 50*time.Minute) {
				for range 2 + b.rng.IntN(3) {
					b.session(v[0]+b.between(0, time.Minute), v[1], 0, 2*time.Second, 40*time.Second, 40, 90, "chat-busy")
				}
			}
		}},
		{"chat left open", "host", "chat-idle", func(b *builder) {
			every := []time.Duration{3 * time.Hour, 20 * time.Second}[b.rng.IntN(2)] // with or without pings
			b.pinged(hm(8, 0), hm(8, 0)+b.between(hm(9, 0), hm(14, 0)), every, false, 6)
			v := b.moments(1, hm(10, 0), hm(16, 0), 20*time.Minute, 50*time.Minute)[0]
			b.session(v[0], v[1], 0, 2*time.Second, 40*time.Second, 40, 90, "chat-busy")
		}},
		{"game server", "host", "game-idle", func(b *builder) {
			for _, v := range b.moments(2, hm(15, 0), hm(23, 30), 20*time.Minute, 90*time.Minute) {
				for range 1 + b.rng.IntN(3) {
					b.session(v[0]+b.between(0, 5*time.Minute), v[1]-b.between(0, 5*time.Minute), 0, 400*time.Millisecond, 600*time.Millisecond, 12, 900, "game-busy")
				}
			}
		}},
		{"notebook server", "host", "jupyter-idle", func(b *builder) {
			for _, s := range b.sessions() {
				b.visit(s[0], s[0]+b.between(10*time.Minute, 40*time.Minute), 3*time.Second, 20*time.Second, time.Minute, "jupyter-tab")
			}
			if b.chance(0.7) { // the kernel continues to compute after the tab was closed
				from := b.between(hm(18, 45), hm(19, 30))
				b.task(from)
				b.works(from, from+b.between(hm(0, 30), hm(2, 0)), "train", "cpu", "disk")
			}
		}},
		{"notebook tab left open", "host", "jupyter-idle", func(b *builder) {
			s := b.sessions()[0]
			b.visit(s[0], s[0]+b.between(20*time.Minute, 60*time.Minute), 3*time.Second, 20*time.Second, time.Minute, "jupyter-tab")
			b.pinged(s[0], s[0]+b.between(hm(8, 0), hm(12, 0)), 10*time.Second, false, 400)
		}},
		{"agent waiting for an API", "host", "chat-idle", func(b *builder) {
			for _, v := range b.moments(5, hm(8, 0), hm(22, 0), 6*time.Minute, 45*time.Minute) {
				b.task(v[0])
				b.thinksWithModel(v[0], v[1], 5*time.Second, 4*time.Minute)
			}
		}},
		{"CI runner", "host", "python-idle", func(b *builder) {
			for _, v := range b.moments(6, hm(7, 0), hm(23, 0), 2*time.Minute, 18*time.Minute) {
				b.task(v[0])
				b.works(v[0], v[1], []string{"build-c", "build-go"}[b.rng.IntN(2)], "cpu", "disk")
			}
		}},
		{"training run", "host", "python-idle", func(b *builder) {
			from := b.between(hm(1, 0), hm(16, 0))
			b.task(from)
			b.works(from, from+b.between(hm(2, 0), hm(5, 0)), "train", "cpu", "disk")
		}},
		{"computation in memory", "host", "python-idle", func(b *builder) {
			for _, v := range b.moments(3, hm(2, 0), hm(22, 0), 10*time.Minute, 50*time.Minute) {
				b.task(v[0])
				b.did(use, v[0], v[1], "cpu")
				b.loads = append(b.loads, load{from: v[0], to: v[1], block: "train", memory: true, quiet: true})
			}
		}},
		{"backup target", "host", "python-idle", func(b *builder) {
			v := b.moments(1, hm(0, 30), hm(5, 0), 20*time.Minute, 70*time.Minute)[0]
			b.session(v[0], v[1], 0, time.Second, 3*time.Second, 400_000, 30, "backup")
		}},
		{"slow download", "host", "nginx-idle", func(b *builder) {
			for _, v := range b.moments(3, hm(6, 0), day, 10*time.Minute, 50*time.Minute) {
				c := conn{from: v[0], to: v[1]}
				c.request(v[0], time.Millisecond, 300, 1000)
				for t := v[0]; t < v[1]-time.Second; t += b.between(time.Second, 20*time.Second) {
					c.messages = append(c.messages, message{t + 2*time.Millisecond, false, 1400})
				}
				b.conns = append(b.conns, c)
				b.did(use, v[0], v[1], "connections", "net")
			}
		}},
		{"development container", "host", "tsserver-idle", func(b *builder) {
			for _, s := range b.sessions() {
				b.session(s[0], s[1], s[1]+b.between(0, 10*time.Minute), time.Second, 50*time.Second, 300, 3000, "tsserver-edit")
			}
		}},
		{"scraped service", "host", "prometheus", func(b *builder) {
			b.probed(0, day, 15*time.Second)
		}},
		{"bot", "host", "chat-idle", func(b *builder) {
			b.port = false
			b.pinged(0, day, 41*time.Second, true, 60)
		}},
		{"preview deployment", "host", "node-idle", func(b *builder) {
			for _, v := range b.moments(1+b.rng.IntN(3), hm(9, 0), hm(18, 0), time.Minute, 15*time.Minute) {
				b.visit(v[0], v[1], time.Second, 15*time.Second, 5*time.Second, "node-visit")
			}
		}},
		{"unused service", "host", "", func(b *builder) {
			b.base = []string{"redis-idle", "node-idle", "gunicorn-idle", "game-idle", "postgres-idle", "nginx-idle"}[b.rng.IntN(6)]
		}},
	}
}

// scenarios returns all kinds of days whose use a signal shows.
func scenarios() []scenario {
	return append(append(hostScenarios(), machineScenarios()...), fleetScenarios()...)
}

// unseenScenarios returns kinds of days on which no signal of the default
// settings shows the use. Only a lease, a snooze or a longer timeout can protect
// such use.
func unseenScenarios() []scenario {
	return []scenario{
		{"job that polls a service", "host", "chat-idle", func(b *builder) {
			for _, v := range b.moments(4, hm(8, 0), hm(22, 0), 10*time.Minute, 50*time.Minute) {
				b.task(v[0])
				for t := v[0] + time.Second; t < v[1]; t += b.between(20*time.Second, 100*time.Second) {
					b.conns = append(b.conns, conn{from: t, to: t + 300*time.Millisecond, out: true, messages: []message{{t, false, 500}, {t + 200*time.Millisecond, true, 900}}})
				}
				b.did(use, v[0], v[1], "tcp", "net", "connections")
			}
		}},
		{"job that waits for its own clock", "host", "python-idle", func(b *builder) {
			for _, v := range b.moments(3, hm(8, 0), hm(22, 0), 20*time.Minute, 80*time.Minute) {
				b.task(v[0])
				for t := v[0]; t < v[1]; t += b.between(2*time.Minute, 10*time.Minute) {
					b.play(t, min(t+4*time.Second, v[1]), "build-c")
				}
				b.did(use, v[0], v[1], "cpu", "disk", "connections", "net")
			}
		}},
		{"job that polls every few minutes", "agent", "", func(b *builder) {
			b.background()
			s := b.sessions()[0]
			b.shell(0, s[0], s[1], 0, 12*time.Minute)
			to := s[1] + b.between(hm(2, 0), hm(5, 0))
			for t := s[1]; t < to; t += b.between(2*time.Minute, 6*time.Minute) {
				b.flows = append(b.flows, flow{t, t + time.Second, 3000})
			}
			b.did(use, s[1], to, "network")
		}},
		{"soak test that nobody announces", "fleet", "", func(b *builder) {
			b.sources = []string{"cml"}
			s := b.sessions()
			b.atWork("anna", s[0][0], s[0][1], 14*time.Minute)
			to := s[0][1] + b.between(hm(3, 0), hm(8, 0))
			b.runs(s[0][1], to, 0.5)
			b.did(use, s[0][1], to, "cml")
		}},
	}
}

package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
	"lull/internal/lib/errtest"
)

// on returns an option that makes a spec depend on others.
func on(names ...string) func(*instance.Spec) {
	return func(s *instance.Spec) { s.DependsOn = names }
}

// TestDependenciesSleepLast has web depend on api, and api on db; only web has
// clients. It checks that all stay awake while web is awake, and sleep after it.
func TestDependenciesSleepLast(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.run("db", nil)
		r.run("api", on("db"))
		web := r.run("web", on("api"))
		c := r.k.Connect(web)
		for range 30 {
			time.Sleep(time.Minute)
			r.is("db", power.Running)
			r.is("api", power.Running)
		}
		if o := r.is("db", power.Running); !slices.ContainsFunc(o.Blocks, func(b idle.Block) bool { return b.Code == NeededBy && b.Holder == "api" }) {
			t.Errorf("db is held by %v", o.Blocks)
		}
		c.Close()
		time.Sleep(4 * time.Minute)
		for _, name := range []string{"web", "api", "db"} {
			r.is(name, power.Paused)
		}
		if w, a, d := r.is("web", power.Paused).LastPausedAt, r.is("api", power.Paused).LastPausedAt, r.is("db", power.Paused).LastPausedAt; a.Before(*w) || d.Before(*a) {
			t.Errorf("paused at %v, %v, %v", w, a, d)
		}
	})
}

// TestDependenciesWakeFirst checks that a wake of web, by a connection or a user,
// first wakes its dependencies, from each state in which they can sleep.
func TestDependenciesWakeFirst(t *testing.T) {
	ways := map[string]func(r *rig, db string) error{
		"paused": func(r *rig, db string) error { return r.Pause(context.Background(), db, ByManual, false) },
		"stopped by lull": func(r *rig, db string) error {
			err := r.Pause(context.Background(), db, ByManual, false)
			time.Sleep(time.Hour)
			return err
		},
	}
	for name, sleep := range ways {
		for _, by := range []string{"connection", "resume"} {
			t.Run(name+"/"+by, func(t *testing.T) {
				inBubble(t, func(r *rig) {
					db := r.run("db", nil)
					web := r.run("web", func(s *instance.Spec) { s.DependsOn, s.StopAfter = []string{"db"}, new(idle.Duration) })
					errtest.None(t, r.Pause(context.Background(), web, ByManual, false))
					errtest.None(t, sleep(r, db))
					if s := r.byName["db"].state(); s == power.Running {
						t.Fatal("db is awake")
					}
					if by == "connection" {
						if c := r.k.Connect(web); !answered(c) {
							t.Fatal("no answer")
						}
					} else if err := r.Resume(context.Background(), web, ByManual); err != nil {
						t.Fatal(err)
					}
					w, d := r.is("web", power.Running), r.is("db", power.Running)
					if d.StateSince.After(*w.StateSince) {
						t.Errorf("db runs since %v, and web since %v", d.StateSince, w.StateSince)
					}
					if d.LastResumedBy != byDependent && d.LastResumedBy != byConnection {
						t.Errorf("db was woken by %q", d.LastResumedBy)
					}
				})
			})
		}
	}
}

// answered waits until a client has a result, and reports whether it was answered.
func answered(c *hosttest.Client) bool {
	for range 300 {
		synctest.Wait()
		if c.Outcome() == "answered" {
			return true
		}
		time.Sleep(time.Second)
	}
	return false
}

// TestDependencyThatDoesNotRun checks that clients of web are answered even if its
// dependencies cannot run.
func TestDependencyThatDoesNotRun(t *testing.T) {
	for name, end := range map[string]func(r *rig, db string) error{
		"stopped by a user": func(r *rig, db string) error { return r.Stop(context.Background(), db, ByManual, false) },
		"disabled":          func(r *rig, db string) error { return r.Stop(context.Background(), db, ByManual, true) },
		"removed":           func(r *rig, db string) error { return r.Delete(context.Background(), db, ByManual) },
		"paused outside lull": func(r *rig, db string) error {
			if err := r.k.Proc(db).Freeze(r.ctx); err != nil {
				return err
			}
			return r.Observe("db", "it was paused outside")
		},
		"ended": func(r *rig, db string) error {
			r.k.Proc(r.byName["db"].id).Exit(0)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				db, web := r.run("db", nil), ""
				web = r.run("web", on("db"))
				errtest.None(t, r.Pause(context.Background(), web, ByManual, false))
				errtest.None(t, end(r, db))
				if c := r.k.Connect(web); !answered(c) {
					t.Fatal("no answer")
				}
				if o, err := r.Get("db"); err == nil && o.State == string(power.Running) {
					t.Error("db runs again")
				}
			})
		})
	}
}

func invalid(err error) bool { _, ok := errors.AsType[*InvalidError](err); return ok }

func TestDependenciesOfANewInstance(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.run("db", nil)
		r.run("api", on("db"))
		for _, c := range []struct {
			name string
			on   []string
		}{{"web", []string{"web"}}, {"web", []string{"cache"}}, {"web", []string{"No Name"}}} {
			if _, err := r.Create(context.Background(), hosttest.Spec(c.name, on(c.on...))); !invalid(err) {
				t.Errorf("%s on %v: %v", c.name, c.on, err)
			}
		}
		errtest.None(t, r.Delete(context.Background(), "db", ByManual))
		if _, err := r.Create(context.Background(), hosttest.Spec("db", on("api"))); !invalid(err) {
			t.Errorf("a circle: %v", err)
		}
	})
}

// TestDependenciesAtRandom has three instances, each depending on the next, go
// through random requests, clients, waits and crashes of the daemon. It checks that
// every client is answered, and none while a dependency sleeps in memory.
func TestDependenciesAtRandom(t *testing.T) {
	names := []string{"db", "api", "web"}
	rapid.Check(t, func(rt *rapid.T) {
		steps := rapid.SliceOfN(rapid.SampledFrom([]string{"pause db", "pause api", "pause web", "client db", "client api", "client web", "wait", "long", "crash", "stop db", "start db", "resume web"}), 1, 12).Draw(rt, "steps")
		inBubble(t, func(r *rig) {
			ids := map[string]string{}
			for n, name := range names {
				ids[name] = r.run(name, func(s *instance.Spec) {
					if s.StopAfter = new(idle.Duration); n > 0 {
						s.DependsOn = names[n-1 : n]
					}
				})
			}
			userStopped := false
			for at, step := range steps {
				verb, name, _ := strings.Cut(step, " ")
				id := ids[name]
				switch verb {
				case "pause":
					_ = r.Pause(context.Background(), id, ByManual, false) // refused while something keeps it awake
				case "stop":
					userStopped = true
					_ = r.Stop(context.Background(), id, ByManual, false)
				case "start":
					userStopped = false
					_ = r.Start(context.Background(), id, ByManual)
				case "resume":
					_ = r.Resume(context.Background(), id, ByManual)
				case "wait":
					time.Sleep(7 * time.Second)
				case "long":
					time.Sleep(20 * time.Minute)
				case "crash":
					r.crash()
					r.boot()
				case "client":
					if name == "db" && userStopped {
						continue
					}
					var woken []string // each was woken by its predecessor in the list
					for n := slices.Index(names, name); n > 0 && r.byName[names[n]].state().Asleep(); n-- {
						woken = append(woken, names[n-1])
					}
					c := r.k.Connect(id)
					if !answered(c) {
						t.Fatalf("%v: no answer to the client of step %d", steps, at)
					}
					for _, dep := range woken {
						if s := r.byName[dep].state(); s.Asleep() && !(dep == "db" && userStopped) {
							t.Fatalf("%v: %s is %s after step %d", steps, dep, s, at)
						}
					}
					c.Close()
				}
				synctest.Wait()
			}
		})
		if t.Failed() {
			rt.Fatal(fmt.Sprint(steps))
		}
	})
}

package agent

import (
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
)

// TestUnfitSettings checks that settings that can be parsed but cannot work are
// rejected, with their name and source, whether they come from a tag or from the
// file.
func TestUnfitSettings(t *testing.T) {
	for name, c := range map[string]struct {
		tags  map[string]string
		file  string
		tag   string
		where string
		warn  time.Duration
	}{
		"a long warning in a tag":          {tags: map[string]string{"idle-timeout": "30m", "warn-before": "40m"}, tag: "lull:warn-before", warn: 5 * time.Minute},
		"a long warning in the file":       {file: "idle-timeout: 30m\nwarn-before: 40m\n", tag: "warn-before", where: "/etc/lull/agent.yaml", warn: 5 * time.Minute},
		"longer than the other's timeout":  {tags: map[string]string{"idle-timeout": "30m"}, file: "warn-before: 40m\n", tag: "warn-before", where: "/etc/lull/agent.yaml", warn: 5 * time.Minute},
		"as long as the timeout":           {tags: map[string]string{"idle-timeout": "30m", "warn-before": "30m"}, warn: 30 * time.Minute},
		"an unknown user in a tag":         {tags: map[string]string{"idle-timeout": "30m", "pre-stop-user": "no-such-user"}, tag: "lull:pre-stop-user", warn: 5 * time.Minute},
		"an unknown user in the file":      {file: "idle-timeout: 30m\npre-stop-user: no-such-user\n", tag: "pre-stop-user", where: "/etc/lull/agent.yaml", warn: 5 * time.Minute},
		"a user that exists":               {file: "idle-timeout: 30m\npre-stop-user: root\n", warn: 5 * time.Minute},
		"a default beside a short timeout": {tags: map[string]string{"idle-timeout": "2m"}, warn: 5 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			for k, v := range c.tags {
				w.tags["lull:"+k] = v
			}
			if c.file != "" {
				w.config = []byte(c.file)
			}
			w.tune = func(o *Options) { o.Hooks, o.ConfigPath = ShellHooks{}, "/etc/lull/agent.yaml" }
			bubble(t, w, func(t *testing.T, a *Agent) {
				r, err := a.Reload(t.Context())
				errtest.None(t, err)
				if c.tag == "" {
					if len(r.Faults) > 0 {
						t.Errorf("faults %+v", r.Faults)
					}
				} else if len(r.Faults) != 1 || r.Faults[0].Tag != c.tag || r.Faults[0].Where != c.where || !hasAlarm(mustStatus(t, a), "config_faults", c.tag) {
					t.Errorf("faults %+v, want %s in %q", r.Faults, c.tag, c.where)
				}
				errtest.None(t, a.ask(t.Context(), func() {
					if a.config.WarnBefore != c.warn {
						t.Errorf("warns %s before, want %s", a.config.WarnBefore, c.warn)
					}
				}))
			})
		})
	}
}

// TestNoHookAsSomebodyElse checks that a hook whose user does not exist is not run as
// the agent's own user.
func TestNoHookAsSomebodyElse(t *testing.T) {
	h := ShellHooks{}.Run(t.Context(), HookSpec{Command: "id -un", User: "no-such-user", Timeout: time.Minute})
	if h.Error == "" || h.Output != "" {
		t.Errorf("%+v", h)
	}
	if err := (ShellHooks{}).CheckUser("no-such-user"); err == nil || !strings.Contains(err.Error(), "no-such-user") {
		t.Error(err)
	}
}

package project

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strings"

	"github.com/compose-spec/compose-go/v2/types"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/policy/when"
)

// member is a service of a project, and the spec of its instance.
type member struct {
	name  string
	after []string // names of the services to start before it
	spec  instance.Spec
}

// project is the content of a project file.
type project struct {
	name     string
	services []member       // in start order: each service after its dependencies
	compose  *types.Project // the services that Docker Compose runs; nil if lull runs them itself
}

// describe converts a loaded file to a project. The error joins every fault, each
// with its line.
func describe(f *file, p *types.Project) (*project, error) {
	return inOrder(f, p, func(c *converter, s *instance.Spec) { *s = c.spec(p) })
}

// inOrder returns the project of p, with each service after its dependencies. make
// fills the spec of a service, in which only the name is set.
func inOrder(f *file, p *types.Project, make func(c *converter, s *instance.Spec)) (*project, error) {
	out := &project{name: p.Name}
	var errs []error
	done := map[string]bool{}
	for len(done) < len(p.Services) {
		before := len(done)
		for _, name := range p.ServiceNames() {
			s := p.Services[name]
			after := slices.Sorted(maps.Keys(s.DependsOn))
			if done[name] || slices.ContainsFunc(after, func(d string) bool { _, has := p.Services[d]; return has && !done[d] }) {
				continue
			}
			done[name] = true
			c := converter{f: f, at: []string{"services", name}, s: s}
			m := member{name: name, after: after, spec: instance.Spec{Name: p.Name + "-" + name, Runtime: instance.RuntimeDocker}}
			make(&c, &m.spec)
			out.services = append(out.services, m)
			errs = append(errs, c.errs...)
		}
		if len(done) == before {
			return nil, f.fault([]string{"services"}, "the services depend on each other in a circle")
		}
	}
	if len(out.services) == 0 {
		errs = append(errs, f.fault([]string{"services"}, "the project has no services"))
	}
	return out, errors.Join(errs...)
}

// converter converts one service to a spec and collects the faults.
type converter struct {
	f    *file
	at   []string
	s    types.ServiceConfig
	errs []error
}

func (c *converter) bad(field, format string, args ...any) {
	path := slices.Clone(c.at)
	if field != "" {
		path = append(path, strings.Split(field, ".")...)
	}
	c.errs = append(c.errs, c.f.fault(path, format, args...))
}

func (c *converter) spec(p *types.Project) instance.Spec {
	s := c.s
	out := instance.Spec{Name: p.Name + "-" + s.Name, Runtime: "process", User: s.User, Workdir: s.WorkingDir, Labels: map[string]string{}}
	for k, v := range s.Labels {
		if !strings.HasPrefix(k, "lull.") {
			out.Labels[k] = v
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.DependsOn)) {
		out.DependsOn = append(out.DependsOn, p.Name+"-"+name)
	}
	out.Command = slices.Concat(s.Entrypoint, s.Command)
	if s.Image != nothing {
		out.Runtime, out.Image = "container", s.Image
		if len(s.Command) > 0 && len(s.Entrypoint) == 0 {
			c.bad("command", "set entrypoint too: a command replaces the image's entrypoint as well")
		}
		if strings.HasPrefix(s.Image, ".") {
			out.Image = filepath.Join(p.WorkingDir, s.Image)
		}
	} else if out.Workdir == "" {
		out.Workdir = p.WorkingDir
	}
	if out.Runtime == "process" && len(out.Command) == 0 {
		c.bad("command", "a service without an image needs a command")
	}
	if out.Workdir != "" && out.Runtime == "process" && !filepath.IsAbs(out.Workdir) {
		out.Workdir = filepath.Join(p.WorkingDir, out.Workdir)
	}
	for _, k := range slices.Sorted(maps.Keys(s.Environment)) {
		if v := s.Environment[k]; v != nil {
			out.Env = append(out.Env, k+"="+*v)
		}
	}
	c.limits(&out)
	c.life(&out)
	c.idle(&out)
	c.ports(&out)
	c.volumes(&out)
	if len(c.errs) == 0 {
		if err := out.CheckNew(); err != nil {
			c.bad("", "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
		}
	}
	return out
}

// limits converts the memory and CPU limits, which Compose allows in two
// places.
func (c *converter) limits(out *instance.Spec) {
	s := c.s
	out.Memory, out.CPUs = int64(s.MemLimit), float64(s.CPUS)
	scale := 1
	if s.Scale != nil {
		scale = *s.Scale
	}
	if d := s.Deploy; d != nil {
		if l := d.Resources.Limits; l != nil {
			out.Memory = cmp.Or(out.Memory, int64(l.MemoryBytes))
			out.CPUs = cmp.Or(out.CPUs, float64(l.NanoCPUs))
		}
		if d.Replicas != nil {
			scale = *d.Replicas
		}
	}
	if scale != 1 {
		c.bad("deploy", "%d copies are not supported: write a service for each", scale)
	}
}

// life converts the restart policy, the timeouts and the dependencies.
func (c *converter) life(out *instance.Spec) {
	s := c.s
	switch s.Restart {
	case "":
	case "unless-stopped":
		out.Restart = instance.RestartAlways
	default:
		out.Restart = instance.Restart(s.Restart)
	}
	if s.StopGracePeriod != nil {
		out.StopGrace = idle.Duration(*s.StopGracePeriod)
	}
	for name, d := range s.DependsOn {
		switch d.Condition {
		case "", types.ServiceConditionStarted, types.ServiceConditionHealthy: // lull waits until the dependency listens or exits, which satisfies these conditions
		default:
			c.bad("depends_on."+name, "the condition %s is not supported", d.Condition)
		}
	}
}

// idle converts lull's own settings, from the extension attribute and from labels.
func (c *converter) idle(out *instance.Spec) {
	set := map[string]any{}
	for k, v := range c.s.Labels {
		if field, ok := strings.CutPrefix(k, "lull."); ok {
			set[strings.ReplaceAll(field, "-", "_")] = v
		}
	}
	if more, ok := c.s.Extensions[xLull].(map[string]any); ok {
		maps.Copy(set, more)
	}
	span := func(field string, to func(idle.Duration)) {
		v, ok := set[field]
		if !ok {
			return
		}
		delete(set, field)
		text := fmt.Sprint(v)
		d, err := when.Span(text)
		if text == "0" {
			d, err = 0, nil
		}
		if err != nil {
			c.bad(field, "%v", err)
			return
		}
		to(idle.Duration(d))
	}
	word := func(field string, to *string) {
		if v, ok := set[field]; ok {
			*to = fmt.Sprint(v)
			delete(set, field)
		}
	}
	flag := func(field string, to func(bool)) {
		v, ok := set[field]
		if !ok {
			return
		}
		delete(set, field)
		switch fmt.Sprint(v) {
		case "true":
			to(true)
		case "false":
			to(false)
		default:
			c.bad(field, "%v is not a boolean (true or false)", v)
		}
	}
	if v, ok := set["probes"]; ok {
		delete(set, "probes")
		out.Probes = c.probes(v)
	}
	span("pause_after", func(d idle.Duration) { out.PauseAfter = &d })
	span("stop_after", func(d idle.Duration) { out.StopAfter = &d })
	span("reclaim_after", func(d idle.Duration) { out.ReclaimAfter = d })
	span("hibernate_after", func(d idle.Duration) { out.HibernateAfter = d })
	span("quiet_connection_after", func(d idle.Duration) { out.QuietConnectionAfter = d })
	span("ready_timeout", func(d idle.Duration) { out.ReadyTimeout = d })
	word("runtime", &out.Runtime)
	word("idle_policy", &out.IdlePolicy)
	word("net", (*string)(&out.Net))
	flag("wake", func(on bool) { out.WakeFromStopped = &on })
	flag("wake_on_outbound", func(on bool) { out.WakeOnOutbound = on })
	switch v := set["schedule"].(type) {
	case nil:
	case []any:
		for _, one := range v {
			out.WakeSchedule = append(out.WakeSchedule, fmt.Sprint(one))
		}
	default:
		out.WakeSchedule = []string{fmt.Sprint(v)}
	}
	for _, text := range out.WakeSchedule {
		if _, err := instance.ParseCron(text); err != nil {
			c.bad("schedule", "%v", err)
		}
	}
	delete(set, "schedule")
	delete(set, "path") // used by ports
	for _, k := range slices.Sorted(maps.Keys(set)) {
		c.bad(k, "unknown attribute")
	}
	if !slices.Contains([]string{"process", "container", "microvm", instance.RuntimeDocker}, out.Runtime) {
		c.bad("runtime", "%q is not a runtime (process, container, microvm)", out.Runtime)
	}
	if out.Runtime == "process" && out.Image != "" {
		c.bad("runtime", "a process has no image")
	}
}

// ports converts ports, and those ports of expose that are not among them.
func (c *converter) ports(out *instance.Spec) {
	path := instance.PathAuto
	if more, ok := c.s.Extensions[xLull].(map[string]any); ok && more["path"] != nil {
		path = instance.Path(fmt.Sprint(more["path"]))
	}
	named := map[string]bool{}
	for n, p := range c.s.Ports {
		target := fmt.Sprint(p.Target)
		listen := cmp.Or(p.Published, target)
		if strings.Contains(listen, "-") {
			c.bad(fmt.Sprintf("ports.%d", n), "a range of published ports is not supported: name one")
			continue
		}
		e := instance.Endpoint{Listen: net.JoinHostPort(cmp.Or(p.HostIP, "127.0.0.1"), listen), Target: net.JoinHostPort("127.0.0.1", target), Path: path}
		if listen == target && out.Runtime != "microvm" {
			e.Target = e.Listen // the program itself listens on this address
		}
		switch p.Protocol {
		case "", "tcp":
		case "udp":
			e.Proto = instance.ProtoUDP
		default:
			c.bad(fmt.Sprintf("ports.%d", n), "the protocol %s is not supported", p.Protocol)
		}
		named[target+e.Proto] = true
		out.Expose = append(out.Expose, e)
	}
	for n, text := range c.s.Expose {
		port, proto, _ := strings.Cut(text, "/")
		if proto == "tcp" {
			proto = ""
		}
		if named[port+proto] {
			continue
		}
		e, err := instance.ParseExpose(text, path)
		if err != nil {
			c.bad(fmt.Sprintf("expose.%d", n), "%v", err)
			continue
		}
		out.Expose = append(out.Expose, e)
	}
}

// volumes converts the one shared folder that an instance can have.
func (c *converter) volumes(out *instance.Spec) {
	for n, v := range c.s.Volumes {
		field := fmt.Sprintf("volumes.%d", n)
		switch {
		case out.Runtime == "process":
			c.bad(field, "a program without an image sees this machine's files: leave volumes out")
		case v.Type != types.VolumeTypeBind:
			c.bad(field, "a %s is not supported: name a folder of this machine", cmp.Or(v.Type, "volume"))
		case n > 0:
			c.bad(field, "an instance shares one folder")
		default:
			out.Workspace = v.Source + ":" + v.Target
			if v.ReadOnly {
				out.Workspace += ":ro"
			}
		}
	}
}

package agent

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"lull/internal/core/layers"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/tags"
)

// Names of sources, as shown to users.
const (
	sourceDefault = "default"
	sourceTags    = "tags"
	sourceCache   = "cache"
	sourceFile    = "file"

	sourceExtended = "extended" // set by a user's extension of another source's value
)

// Local is the content of the local file: settings, and options that only this
// file has.
type Local struct {
	Settings      tags.Settings
	AllowTagHooks bool // run hooks from tags, which lets everyone who can write tags control the machine
	ReplaceTags   bool // ignore tags
}

// maxConfig is the maximum size of the local file.
const maxConfig = 64 << 10

// ParseLocal parses the local file that was read from path. It has one setting per
// line, named like its tag, and the options allow-tag-hooks and replace-tags. Lists
// are YAML lists or comma-separated. A file that is not one YAML document is an
// error. An unusable or duplicate setting is a fault, and only that setting is
// ignored.
func ParseLocal(path string, b []byte) (Local, []tags.Fault, error) {
	var l Local
	if len(b) > maxConfig {
		return l, nil, fmt.Errorf("cannot read %s: larger than %d bytes", path, maxConfig)
	}
	var doc, more yaml.Node
	in := yaml.NewDecoder(bytes.NewReader(b))
	if err := in.Decode(&doc); errors.Is(err, io.EOF) {
		return l, nil, nil
	} else if err != nil {
		return l, nil, fmt.Errorf("cannot read %s: %w", path, withoutText(err))
	}
	if err := in.Decode(&more); !errors.Is(err, io.EOF) {
		return l, nil, fmt.Errorf("cannot read %s: want one YAML document, found more", path)
	}
	if len(doc.Content) == 0 {
		return l, nil, nil
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		if root.Kind == yaml.ScalarNode && root.Value == "" {
			return l, nil, nil
		}
		return l, nil, fmt.Errorf("cannot read %s: line %d: want names and values", path, root.Line)
	}
	var faults []tags.Fault
	lines := map[string]int{}
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, node := root.Content[i], root.Content[i+1]
		value, err := scalar(node)
		switch first, twice := lines[key.Value]; {
		case twice: // ambiguous, so no value counts
			l.clear(key.Value)
			err = fmt.Errorf("already set in line %d", first)
		case err == nil:
			err = l.set(key.Value, value)
		}
		lines[key.Value] = key.Line
		if err != nil {
			faults = append(faults, tags.Fault{Tag: key.Value, Value: l.show(key.Value, value), Problem: err.Error(), Where: fmt.Sprintf("%s, line %d", path, key.Line)})
		}
	}
	return l, faults, nil
}

// clear removes one setting.
func (l *Local) clear(name string) {
	switch name {
	case "allow-tag-hooks":
		l.AllowTagHooks = false
	case "replace-tags":
		l.ReplaceTags = false
	}
	l.Settings.Clear(name)
}

func (l *Local) set(name, value string) error {
	switch name {
	case "allow-tag-hooks":
		return parseBool(value, &l.AllowTagHooks)
	case "replace-tags":
		return parseBool(value, &l.ReplaceTags)
	}
	return l.Settings.Set(name, value)
}

// show returns the part of an unusable value that may be shown.
func (l *Local) show(name, value string) string {
	if name == "allow-tag-hooks" || name == "replace-tags" {
		return value
	}
	return tags.Show(name, value)
}

// withoutText removes text of the file from a YAML error. Such text may be a secret:
// a password that begins with an asterisk is read as an alias.
func withoutText(err error) error {
	if strings.Contains(err.Error(), "anchor") {
		return errors.New("yaml: a value begins with * and is no alias; put it in quotes")
	}
	return err
}

func parseBool(v string, into *bool) error {
	switch v {
	case "true":
		*into = true
	case "false":
		*into = false
	default:
		return errors.New("want true or false")
	}
	return nil
}

func scalar(n *yaml.Node) (string, error) {
	switch n.Kind {
	case yaml.ScalarNode:
		return n.Value, nil
	case yaml.SequenceNode:
		var list []string
		for _, e := range n.Content {
			if e.Kind != yaml.ScalarNode {
				return "", errors.New("want a list of plain values")
			}
			list = append(list, e.Value)
		}
		return strings.Join(list, ","), nil
	}
	return "", errors.New("want a plain value or a list")
}

// fetched is the result of reading every source once. If content and error of a
// source are nil, the source is empty.
type fetched struct {
	at       time.Time
	tags     map[string]string
	tagsErr  error
	noTags   bool   // there is no source of tags
	path     string // of the local file
	local    Local
	localErr error
	noLocal  bool
	faults   []tags.Fault
}

// fetch reads every source. It must run outside the loop.
func (a *Agent) fetch(ctx context.Context) fetched {
	f := fetched{at: a.o.Clocks().Wall, path: cmp.Or(a.o.ConfigPath, "the local file")}
	b, err := a.o.Disk.Config()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		f.noLocal = true
	case err != nil:
		f.localErr = err
	default:
		f.local, f.faults, f.localErr = ParseLocal(f.path, b)
	}
	if f.noTags = len(a.o.Tags) == 0; f.noTags {
		return f
	}
	var errs []error
	for _, s := range a.o.Tags {
		sctx, cancel := context.WithTimeout(ctx, sourceLimit)
		t, err := s.Tags(sctx)
		cancel()
		if err == nil {
			f.tags = t
			return f
		}
		errs = append(errs, err)
	}
	f.tagsErr = errors.Join(errs...)
	return f
}

// remembered is the last good configuration, as stored on disk.
type remembered struct {
	Tags    map[string]string `json:"tags"` // settings by name, without a prefix
	TagsAt  time.Time         `json:"tags_at"`
	Local   map[string]string `json:"local"`
	Hooks   bool              `json:"allow_tag_hooks"`
	Replace bool              `json:"replace_tags"`
	LocalAt time.Time         `json:"local_at"`
}

// configured is the effective configuration and where each value comes from. It is
// owned by the loop.
type configured struct {
	Config
	loaded    bool // the first reading has ended
	last      remembered
	tags      tags.Settings // the effective ones
	local     Local
	report    []agentctl.Config
	faults    []tags.Fault
	settings  []agentctl.Setting
	unread    string            // why a source has never been read; empty once each has been
	silent    bool              // every source was read, and none has a setting
	hookWhere map[string]string // the source of each hook's setting
	readAt    time.Time
	reading   []func(agentctl.Reload) // callbacks to call when the reading in progress ends
}

const cacheFile = "config.json"

// loadCache loads the last good configuration that an earlier agent stored.
func (a *Agent) loadCache() {
	b, err := a.o.Disk.Load(cacheFile)
	if err == nil {
		err = json.Unmarshal(b, &a.config.last)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		a.alarm("config_cache", "The last good configuration on disk cannot be read: "+err.Error()+".")
		a.config.last = remembered{}
	}
	a.config.Config = Resolve(tags.Settings{})
}

// refresh reads the sources outside the loop, applies them in the loop and then calls
// done there. If a reading is in progress, it waits for that one instead.
func (a *Agent) refresh(done func(agentctl.Reload)) {
	a.config.reading = append(a.config.reading, done)
	if len(a.config.reading) > 1 {
		return
	}
	a.beside(time.Duration(len(a.o.Tags)+1)*sourceLimit, func(ctx context.Context) func() {
		f := a.fetch(ctx)
		return func() {
			r := a.apply(f)
			waiting := a.config.reading
			a.config.reading = nil
			for _, w := range waiting {
				w(r)
			}
		}
	})
}

// apply makes a reading of the sources the configuration, and returns what changed. A
// source that could not be read keeps its last good values.
func (a *Agent) apply(f fetched) agentctl.Reload {
	c := &a.config
	before := c.effective()
	c.report, c.faults, c.unread = nil, nil, ""
	replace := a.applyLocal(f)
	a.applyTags(f, replace)
	for i, s := range []*tags.Settings{&c.local.Settings, &c.tags} { // the order in which faults are reported
		where := ""
		if i == 0 {
			where = f.path
		}
		found := a.unfit(s, where)
		c.report[i].Faults = append(c.report[i].Faults, found...)
		c.faults = append(c.faults, found...)
	}
	c.loaded, c.readAt = true, a.now()
	said := c.effective()
	c.Config = Resolve(said)
	c.TTLDeadline = a.extend(c.TTLDeadline, c.unread == "")
	c.settings = origins(c, said)
	c.silent = c.unread == "" && len(said.Encode("")) == 0
	r := agentctl.Reload{Changed: said.Changes(before), Faults: c.faults, Config: c.report}
	if r.Changed == nil {
		r.Changed = []string{}
	}
	a.alarmIf(c.unread != "", "config_unreadable", "The configuration cannot be read and nothing is cached: "+c.unread+". The agent does nothing until it can be read.")
	a.alarmIf(len(c.faults) > 0, "config_faults", faultSentence(c.faults))
	a.alarmIf(f.tagsErr != nil && c.unread == "" && !replace, "config_stale", "The tags cannot be read; their last known values apply.")
	var refused []string
	for setting, command := range map[string]string{"pre-stop": c.PreStop, "post-cancel": c.PostCancel} {
		if command != "" && !a.hookAllowed(setting) {
			refused = append(refused, setting)
		}
	}
	slices.Sort(refused)
	a.alarmIf(len(refused) > 0, "tag_hook_refused", "Hooks that come from tags are not run ("+strings.Join(refused, ", ")+"): allow-tag-hooks is not set in the local file.")
	if len(r.Changed) > 0 {
		a.record(agentctl.Entry{Kind: "config", Sentence: "Changed: " + strings.Join(r.Changed, ", ") + "."})
		a.log.Info("configuration changed", "settings", r.Changed)
	}
	return r
}

// effective returns the combined settings of all sources.
func (c *configured) effective() tags.Settings { return c.local.Settings.Over(c.tags) }

func (a *Agent) applyLocal(f fetched) (replace bool) {
	c := &a.config
	rep := agentctl.Config{Source: sourceFile, State: "read", Faults: f.faults, ReadAt: &f.at}
	switch {
	case f.noLocal:
		c.local, rep.State, rep.ReadAt = Local{}, "absent", nil
		c.last.Local, c.last.Hooks, c.last.Replace, c.last.LocalAt = nil, false, false, time.Time{}
	case f.localErr != nil:
		rep.State, rep.Detail, rep.ReadAt = "unreadable", f.localErr.Error(), nil
		if !c.last.LocalAt.IsZero() {
			c.local = Local{Settings: parseAll(c.last.Local), AllowTagHooks: c.last.Hooks, ReplaceTags: c.last.Replace}
			at := c.last.LocalAt
			rep.State, rep.ReadAt = "cached", &at
		} else {
			c.unread = "file: " + f.localErr.Error()
		}
	default:
		c.local = f.local
		keepFaulty(&c.local.Settings, f.faults, "", c.last.Local)
		c.last.Local, c.last.LocalAt = c.local.Settings.Encode(""), f.at
		c.last.Hooks, c.last.Replace = c.local.AllowTagHooks, c.local.ReplaceTags
	}
	c.faults = append(c.faults, f.faults...)
	c.report = append(c.report, rep)
	return c.local.ReplaceTags
}

func (a *Agent) applyTags(f fetched, replace bool) {
	c := &a.config
	rep := agentctl.Config{Source: sourceTags, State: "read", ReadAt: &f.at}
	switch {
	case replace:
		c.tags, rep.State, rep.ReadAt = tags.Settings{}, "replaced", nil
	case f.noTags:
		c.tags, rep.State, rep.ReadAt = tags.Settings{}, "absent", nil
	case f.tagsErr != nil:
		rep.State, rep.Detail, rep.ReadAt = "unreadable", f.tagsErr.Error(), nil
		if !c.last.TagsAt.IsZero() {
			c.tags = parseAll(c.last.Tags)
			at := c.last.TagsAt
			rep.State, rep.ReadAt = "cached", &at
		} else {
			c.unread = strings.TrimPrefix(c.unread+"; tags: "+f.tagsErr.Error(), "; ")
		}
	default:
		var faults []tags.Fault
		c.tags, faults = tags.Parse(a.o.Prefix, f.tags)
		keepFaulty(&c.tags, faults, a.o.Prefix, c.last.Tags)
		rep.Faults = faults
		c.faults = append(c.faults, faults...)
		c.last.Tags, c.last.TagsAt = c.tags.Encode(""), f.at
		a.tagged.seen(tags.DecodeState(a.o.Prefix, f.tags))
		if b, err := json.Marshal(c.last); err == nil {
			a.saver.save(cacheFile, b, func(err error) {
				a.post(func() {
					a.alarmIf(err != nil, "config_cache", fmt.Sprintf("The last good configuration cannot be written to disk: %v.", err))
				})
			})
		}
	}
	c.report = append(c.report, rep)
}

// keepFaulty replaces an invalid setting by its last good value, so that a typing
// error does not lift a limit.
func keepFaulty(s *tags.Settings, faults []tags.Fault, prefix string, last map[string]string) {
	for _, f := range faults {
		name := strings.TrimPrefix(f.Tag, prefix)
		if v, ok := last[name]; ok {
			// if the cached value is no longer valid, the setting is left out
			_ = s.Set(name, v)
		}
	}
}

// unfit returns the settings in s that can be parsed but cannot work: on this
// machine, or together with the rest of s and the other source. path is the file that
// s is from; empty means tags. A warning time longer than the timeout is removed from
// s. A user that does not exist is kept, so that no hook runs as another user.
func (a *Agent) unfit(s *tags.Settings, path string) (out []tags.Fault) {
	fault := func(name, problem string) {
		f := tags.Fault{Tag: a.o.Prefix + name, Problem: problem}
		v, _ := s.Get(name)
		if f.Value = tags.Show(name, v); path != "" {
			f.Tag, f.Where = name, path
		}
		out = append(out, f)
	}
	if check, ok := a.o.Hooks.(UserChecker); ok && s.PreStopUser != nil {
		if err := check.CheckUser(*s.PreStopUser); err != nil {
			fault("pre-stop-user", err.Error()+"; hooks do not run until the user exists")
		}
	}
	timeout := s.IdleTimeout
	if both := a.config.effective(); timeout == nil {
		timeout = both.IdleTimeout
	}
	if s.WarnBefore != nil && timeout != nil && *s.WarnBefore > *timeout {
		fault("warn-before", "longer than the idle-timeout of "+timeout.String())
		s.WarnBefore = nil
	}
	return out
}

func parseAll(values map[string]string) tags.Settings {
	s, _ := tags.Parse("", values)
	return s
}

// source is one layer of the configuration.
type source struct {
	name string
	tags.Settings
}

// sources returns the layers of c, strongest first.
func (c *configured) sources() []source {
	fromTags := sourceTags
	if slices.ContainsFunc(c.report, func(r agentctl.Config) bool { return r.Source == sourceTags && r.State == "cached" }) {
		fromTags = sourceCache
	}
	return []source{{sourceFile, c.local.Settings}, {fromTags, c.tags}, {sourceDefault, Defaults()}}
}

// origins lists every effective setting with its source.
func origins(c *configured, said tags.Settings) []agentctl.Setting {
	var out []agentctl.Setting
	stack := c.sources()
	c.hookWhere = map[string]string{}
	for _, f := range tags.Fields() {
		v, at := layers.Strongest(stack, func(s *source) (string, bool) { return s.Get(f.Name) })
		if at == nil {
			continue
		}
		from := at.name
		switch f.Name {
		case "pre-stop", "post-cancel":
			c.hookWhere[f.Name] = from
		case "ttl-deadline":
			if said.TTLDeadline != nil && !c.TTLDeadline.Equal(*said.TTLDeadline) {
				v, from = c.TTLDeadline.Format(time.RFC3339), sourceExtended
			}
		}
		out = append(out, agentctl.Setting{Name: f.Name, Value: tags.Show(f.Name, v), Source: from})
	}
	return out
}

func faultSentence(faults []tags.Fault) string {
	var parts []string
	for _, f := range faults {
		parts = append(parts, f.Error())
	}
	return strings.Join(parts, "; ") + "."
}

package controller

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/lib/delay"
	"lull/internal/protocol/control"
	"lull/internal/store"
)

// housekeep does the fleet-wide tasks on the server that holds shard 0: it runs
// discovery, lifts a halt whose end has come, and trims the audit log and old
// requests.
func (c *Controller) housekeep(ctx context.Context) error {
	var scan, trim, retag time.Time
	var scanned string
	for {
		if err := delay.For(ctx, 5*time.Second); err != nil {
			return err
		}
		s, now := c.fleet.Settings(), time.Now()
		if now.Sub(retag) >= FullPass {
			retag = now // an override may have begun or ended
			c.mu.Lock()
			for _, e := range c.entries {
				c.untag(e)
			}
			c.mu.Unlock()
		}
		c.writePolicyTags(ctx)
		c.mu.Lock()
		sh := c.shards[0]
		c.mu.Unlock()
		if sh == nil || now.Before(sh.since) {
			continue
		}
		if err := sh.fleet.EndHalt(sh.ctx); err != nil && ctx.Err() == nil {
			c.log.Warn("cannot record the end of the halt", "err", err)
		}
		// A change of the settings that discovery uses triggers a scan.
		if by := fmt.Sprint(s.DiscoveryRegions, s.DiscoveryAMINamePatterns, s.DiscoveryImport, s.AWSDefaultRegion, s.AWSRegionConfigs); now.Sub(scan) >= s.DiscoveryScanInterval || by != scanned {
			scan, scanned = now, by
			c.discover(sh.ctx, sh)
		}
		if now.Sub(trim) >= time.Hour {
			trim = now
			c.trim(sh.ctx, sh)
			if _, err := sh.fleet.TrimOverrides(sh.ctx, now); err != nil && ctx.Err() == nil {
				c.log.Warn("cannot remove old overrides", "err", err)
			}
		}
	}
}

// trim keeps the audit log and the requests within their limits.
func (c *Controller) trim(ctx context.Context, sh *shard) {
	if c.cfg.Archive != nil {
		if _, err := sh.fleet.TrimAudit(ctx, time.Now(), c.cfg.Archive); err != nil && ctx.Err() == nil {
			c.log.Warn("cannot trim the audit log", "err", err)
		}
	}
	page, err := store.List(ctx, c.fleet.Store(), fleet.RequestKeys())
	if err != nil {
		return
	}
	for _, v := range page.Values {
		if r, err := fleet.DecodeRequest(v); err == nil && time.Since(r.At) > fleet.RequestTTL {
			if err := sh.fleet.DropRequest(ctx, r.ID); err != nil {
				return
			}
		}
	}
}

// orphanGrace is how long an instance with our tag may have no worker before it is
// imported. It gives the worker of an unrecorded launch time to find its instance
// first.
const orphanGrace = 10 * time.Minute

// discover scans for instances that are not workers, and records the scan. An
// instance with this fleet's tag is imported, in dry run, after a grace period and a
// second sighting. One found by the name of its image is listed, and imported if the
// settings allow it.
func (c *Controller) discover(ctx context.Context, sh *shard) {
	s, now := c.fleet.Settings(), time.Now().UTC().Round(0)
	tag, value := s.TagPrefix+"managed-by", c.fleet.ID()
	scan := fleet.Scan{At: now, NextAt: now.Add(s.DiscoveryScanInterval), Import: s.DiscoveryImport, Tag: tag + "=" + value, Regions: []fleet.ScannedRegion{}}
	defer func() {
		if err := sh.fleet.PutScan(ctx, scan); err != nil && ctx.Err() == nil {
			c.log.Warn("cannot record a discovery scan", "err", err)
		}
	}()
	if s.DiscoveryImport == "off" {
		return
	}
	known, err := c.fleet.Discovered(ctx)
	if err != nil {
		return
	}
	old := map[string]fleet.Discovered{}
	for _, d := range known {
		old[d.Region+"/"+d.EC2InstanceID] = d
	}
	unread := map[regionKey]bool{}
	for _, k := range c.scanned(s) {
		r := fleet.ScannedRegion{Region: k.name, Account: k.account, AMINamePatterns: []string{}, ImageOwners: slices.Clone(c.cfg.ImageOwners), Skipped: map[string]int{}}
		if r.ImageOwners == nil {
			r.ImageOwners = []string{}
		}
		r.AMINamePatterns = append(r.AMINamePatterns, s.DiscoveryAMINamePatterns...)
		if p := s.AWSRegionConfigs[k.name].AMINamePattern; p != "" {
			r.AMINamePatterns = []string{p}
		}
		if err := c.scan(ctx, sh, &r, Search{Tags: map[string]string{tag: value}}, old); err != nil {
			c.log.Warn("cannot scan a region", "region", k.name, "account", k.account, "err", err)
			r.Error, unread[k] = err.Error(), true
		}
		scan.Regions = append(scan.Regions, r)
	}
	for _, d := range old {
		if unread[regionKey{d.Account, d.Region}] {
			continue // whether it still exists is unknown
		}
		// Gone, imported, or no longer seen.
		if err := sh.fleet.PutDiscovered(ctx, d, true); err != nil {
			return
		}
	}
}

// scanned returns the regions that discovery scans, sorted: the settings'
// regions in all accounts and, without discovery_regions, those of workers in
// their accounts.
func (c *Controller) scanned(s settings.Settings) []regionKey {
	keys := map[regionKey]bool{}
	for _, name := range s.ScannedRegions(slices.Values([]string(nil))) {
		for _, account := range append([]string{""}, c.cfg.Accounts...) {
			keys[regionKey{account, name}] = true
		}
	}
	if len(s.DiscoveryRegions) == 0 {
		c.mu.Lock()
		for k := range c.regions {
			keys[k] = true
		}
		c.mu.Unlock()
	}
	return slices.SortedFunc(maps.Keys(keys), func(a, b regionKey) int {
		return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.account, b.account))
	})
}

// scan scans the region that r names and adds the instances it finds to r. ours is
// the search for this fleet's tag.
func (c *Controller) scan(ctx context.Context, sh *shard, r *fleet.ScannedRegion, ours Search, old map[string]fleet.Discovered) error {
	k := regionKey{r.Account, r.Region}
	cloud, err := c.cfg.Clouds(k.account, k.name)
	if err != nil {
		return err
	}
	states, err := cloud.Observe.States(ctx)
	if err != nil {
		return err
	}
	searches := []Search{ours}
	for _, p := range r.AMINamePatterns {
		searches = append(searches, Search{ImageName: p})
	}
	seen := map[string]bool{}
	for _, q := range searches {
		c.count.calls.add("find")
		found, err := cloud.Observe.Find(ctx, q)
		if err != nil {
			return err
		}
		for _, in := range found {
			if seen[in.ID] || isGone(in.State) {
				continue
			}
			seen[in.ID] = true
			if skip := c.discovered(ctx, sh, k, in, q.ImageName == "", old); skip != "" {
				r.Skipped[skip]++
			} else {
				r.Found++
			}
		}
	}
	for id, state := range states {
		if seen[id] || isGone(state) {
			continue
		}
		seen[id] = true
		skip := fleet.SkipNoMatch
		if owner, err := c.fleet.WorkerOf(ctx, k.name, id); err != nil {
			skip = fleet.SkipUnread
		} else if owner != "" {
			skip = fleet.SkipWorker
		}
		r.Skipped[skip]++
	}
	r.Instances = len(seen)
	return nil
}

// isGone reports whether an instance in state is terminated or about to be.
func isGone(state string) bool { return state == "terminated" || state == "shutting-down" }

// discovered processes one instance of a scan. It returns a Skip code of package
// fleet, or "" if the instance is listed. It removes the instance from old, which in
// the end holds those that no scan shows anymore.
func (c *Controller) discovered(ctx context.Context, sh *shard, k regionKey, in Instance, ours bool, old map[string]fleet.Discovered) (skip string) {
	s := c.fleet.Settings()
	key := k.name + "/" + in.ID
	if owner, err := c.fleet.WorkerOf(ctx, k.name, in.ID); err != nil {
		return fleet.SkipUnread
	} else if owner != "" {
		return fleet.SkipWorker
	}
	if id := in.Tags[s.TagPrefix+"worker-id"]; ours && id != "" {
		if w, err := c.fleet.Worker(ctx, id); err == nil && w.EC2InstanceID == "" {
			delete(old, key)
			return fleet.SkipLaunching // the worker that launched it will find it
		}
	}
	first, seen := old[key]
	delete(old, key)
	if !seen {
		d := fleet.Discovered{Region: k.name, Account: k.account, EC2InstanceID: in.ID, Name: in.Name, State: in.State, Tags: in.Tags, FirstSeenAt: time.Now().UTC().Round(0), Orphan: ours}
		if err := sh.fleet.PutDiscovered(ctx, d, false); err != nil {
			c.log.Warn("cannot record a discovered instance", "instance", in.ID, "err", err)
		}
		return ""
	}
	if ours && time.Since(first.FirstSeenAt) < orphanGrace || !ours && s.DiscoveryImport != "auto" || c.fleet.Halted().On {
		return ""
	}
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-' {
			return r
		}
		return '-'
	}, in.Name)
	if len(name) > 128 {
		name = name[:128]
	}
	if _, err := sh.fleet.ImportWorker(ctx, audit.ByController, fleet.ImportedWorker{Name: name, AWSRegion: k.name, Account: k.account, EC2InstanceID: in.ID}); err != nil {
		c.log.Warn("cannot import a discovered instance", "instance", in.ID, "err", err)
		return ""
	}
	if err := sh.fleet.PutDiscovered(ctx, first, true); err != nil {
		c.log.Warn("cannot clear a discovered instance", "instance", in.ID, "err", err)
	}
	return fleet.SkipImported
}

// Live is this server's knowledge about a worker beyond its record.
type Live struct {
	Owned       bool               `json:"owned"`
	Region      string             `json:"aws_region"`
	EC2         worker.EC2State    `json:"ec2"`
	Idle        *worker.IdleStatus `json:"idle_status,omitempty"`
	Metrics     Metrics            `json:"metrics"`
	NextCheckAt *time.Time         `json:"next_idle_check_at"`
	Failures    int                `json:"failures"`
	Telemetry   []worker.Event     `json:"telemetry_events"`
	Categories  map[string]int64   `json:"unknown_categories,omitempty"`
	// Agent is the last report of the worker's agent; nil for none.
	Agent *control.AgentView `json:"agent,omitempty"`
}

// Metrics are the last readings of a worker's load. A null value means unknown.
type Metrics struct {
	CPUUtilization    *float64   `json:"cpu_utilization"`
	MemoryUtilization *float64   `json:"memory_utilization"`
	DiskUtilization   *float64   `json:"disk_utilization"`
	LabsCount         *int       `json:"labs_count"`
	NodesCount        *int       `json:"nodes_count"`
	SystemInfo        any        `json:"system_info"`
	CMLVersion        string     `json:"cml_version"`
	CollectedAt       *time.Time `json:"collected_at"`
	CloudWatchError   string     `json:"cloudwatch_error,omitempty"`
	CMLError          string     `json:"cml_error,omitempty"`
}

// Live returns what this server knows about a worker; false if it does not know
// the worker.
func (c *Controller) Live(id string) (Live, bool) {
	c.mu.Lock()
	e := c.entries[id]
	if e == nil {
		c.mu.Unlock()
		return Live{}, false
	}
	load := cmp.Or(e.load, &loadSeen{})
	w, v, l, inst, seen := e.w, e.known(), Live{Owned: c.shards[e.shard] != nil, Failures: e.failures, Agent: e.agent.view(time.Now())}, e.inst, e.agent
	l.EC2 = worker.EC2State{State: e.seen, Tags: w.Tags}
	if at := e.seenAt; !at.IsZero() {
		l.EC2.ObservedAt = &at
	}
	unread := c.unread(&w)
	var taken time.Time
	if s := c.shards[e.shard]; s != nil {
		taken = s.since
	}
	c.mu.Unlock()
	l.Region = w.AWSRegion
	if inst != nil {
		l.EC2.Tags = inst.Tags
		if t := inst.LaunchTime; !t.IsZero() {
			l.EC2.LaunchTime = &t
		}
	}
	m := &l.Metrics
	m.CPUUtilization, m.MemoryUtilization, m.DiskUtilization = load.CPU, load.Memory, load.Disk
	if load.Err != nil {
		m.CloudWatchError = load.Err.Error()
	}
	m.LabsCount, m.NodesCount, m.CMLVersion, m.CMLError = v.system.Labs, v.system.Nodes, v.system.Version, v.systemErr
	if len(v.system.Info) > 0 {
		m.SystemInfo = v.system.Info
	}
	if !v.metricsAt.IsZero() {
		m.CollectedAt = &v.metricsAt
	}
	l.Telemetry, l.Categories = v.telemetry.Recent, v.telemetry.Categories
	if !v.nextCheck.IsZero() {
		l.NextCheckAt = &v.nextCheck
	}
	rules := c.rulesOf(time.Now(), &w)
	var readings []idle.Reading
	if l.Owned {
		readings = slices.DeleteFunc(slices.Clone(v.readings), func(r idle.Reading) bool {
			return r.Signal == worker.SourceAgent || strings.HasPrefix(r.Signal, worker.SourceAgent+":")
		})
		if slices.Contains(rules.ActivitySources, worker.SourceAgent) {
			readings = append(readings, seen.readings(time.Now())...) // the agent's readings may be newer than the last check
		}
	}
	var guards []idle.Block
	if c.cfg.Guards != nil {
		guards = c.cfg.Guards(&w, time.Now())
	}
	st := c.fleet.StatusOf(time.Now(), &w, &rules, readings, slices.Concat(guards, accepted(&rules, v), seen.holds()), c.cfg.Shadow)
	if v.verdict != nil {
		st.CheckedAt = v.checkedAt
	}
	if w.Status == power.WorkerRunning && (w.IsIdleDetectionEnabled || rules.ScheduleState != nil) {
		st.NextIdleCheckAt = v.nextCheck
	}
	st.Checking = checking(&w, v, taken, time.Now())
	st.CloudUnread = unread
	l.Idle = &st
	return l, true
}

const (
	// firstCheckWithin is how long the first check of a worker may be overdue
	// before its unknown signals raise an alarm.
	firstCheckWithin = 2 * time.Minute
	// bootWithin is how long CML may boot before its unknown signals raise an alarm.
	bootWithin = 10 * time.Minute
)

// checking reports whether signals of w are unknown only because w has not been
// checked since this server took it over at taken, or because CML is booting.
func checking(w *worker.Worker, v live, taken, now time.Time) bool {
	if v.verdict == nil {
		due := taken
		for _, at := range []time.Time{w.LastStart(), v.nextCheck} {
			if at.After(due) {
				due = at
			}
		}
		return now.Sub(due) < firstCheckWithin
	}
	return !w.CMLReady && w.LastResumedAt != nil && now.Sub(*w.LastResumedAt) < bootWithin
}

// Verdicts returns the idle status, without readings, of every worker that this
// server owns and that runs or whose region cannot be read.
func (c *Controller) Verdicts() map[string]worker.IdleStatus {
	c.mu.Lock()
	var ids []string
	for id, e := range c.entries {
		unread := e.w.Status != power.WorkerTerminated && c.unread(&e.w) != nil
		if (e.w.Status == power.WorkerRunning || unread) && c.shards[e.shard] != nil {
			ids = append(ids, id)
		}
	}
	c.mu.Unlock()
	out := make(map[string]worker.IdleStatus, len(ids))
	for _, id := range ids {
		if l, ok := c.Live(id); ok && l.Owned && l.Idle != nil {
			st := *l.Idle
			st.Readings, st.CPU = nil, l.Metrics.CPUUtilization
			out[id] = st
		}
	}
	return out
}

// TriggerReconcile schedules every worker of this server now.
func (c *Controller) TriggerReconcile() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, e := range c.entries {
		if c.shards[e.shard] != nil {
			e.reconciled = false
			c.kick(e, time.Now())
			n++
		}
	}
	for _, r := range c.regions {
		r.soon()
	}
	return n
}

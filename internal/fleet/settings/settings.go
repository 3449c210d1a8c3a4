// Package settings holds the settings of a fleet and where each value comes
// from: a flag, the environment, the store, the config file or its default.
package settings

import (
	"crypto/x509"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/fleet/channel"
	"lull/internal/fleet/sealed"
)

// MaxMinutes is the maximum of every setting in minutes: a year.
const MaxMinutes = 525_600

// Settings are the effective settings of the fleet. The struct tags define the names:
// env is the environment variable, its lower case is the key in the API and in the
// config file, and unit is the unit of a number outside this program.
type Settings struct {
	WorkerIdleTimeout               time.Duration     `env:"WORKER_IDLE_TIMEOUT_MINUTES" default:"60" unit:"minutes" min:"1" max:"525600" doc:"Idle timeout: time without activity before a worker is idle."`
	WorkerAutoPauseEnabled          bool              `env:"WORKER_AUTO_PAUSE_ENABLED" default:"true" doc:"Pause idle workers automatically."`
	WorkerAutoPauseSnooze           time.Duration     `env:"WORKER_AUTO_PAUSE_SNOOZE_MINUTES" default:"60" unit:"minutes" max:"525600" doc:"Snooze after a resume, during which a worker is not paused."`
	WorkerWarnBefore                time.Duration     `env:"WORKER_WARN_BEFORE_MINUTES" default:"5" unit:"minutes" max:"1440" doc:"Time between the warning and the pause; 0 pauses without a warning."`
	WorkerActivityDetectionEnabled  bool              `env:"WORKER_ACTIVITY_DETECTION_ENABLED" default:"true" doc:"Fetch telemetry from CML. If off, no worker is paused for idleness."`
	WorkerActivityDetectionInterval time.Duration     `env:"WORKER_ACTIVITY_DETECTION_INTERVAL" default:"1800" unit:"seconds" min:"60" max:"86400" doc:"Longest interval between telemetry fetches. Fetches are more frequent as a pause comes closer."`
	WorkerActivityEventsMaxStored   int               `env:"WORKER_ACTIVITY_EVENTS_MAX_STORED" default:"10" max:"100" doc:"Recent activity events kept for each worker."`
	WorkerActivityCategories        []string          `env:"WORKER_ACTIVITY_RELEVANT_CATEGORIES" default:"start_lab,stop_lab,create_lab,import_lab,export_lab,wipe_lab,delete_lab,start_node,stop_node,queue_node,boot_node,wipe_node,packet_capture,user_activity" doc:"CML telemetry categories that count as activity."`
	WorkerActivityExcludedUsers     string            `env:"WORKER_ACTIVITY_EXCLUDED_USER_PATTERN" default:"^00000000-0000-.*" doc:"Ignore user_activity of users whose ID matches this pattern."`
	IdleDetectionInterval           time.Duration     `env:"IDLE_DETECTION_INTERVAL" default:"300" unit:"seconds" min:"10" max:"86400" doc:"Minimum interval between idle checks of a worker."`
	ReconcileInterval               time.Duration     `env:"RECONCILE_INTERVAL" default:"30" unit:"seconds" min:"1" max:"3600" doc:"Interval between reconciliation cycles."`
	ReconcilePollingEnabled         bool              `env:"RECONCILE_POLLING_ENABLED" default:"true" doc:"Run the sweep in each reconciliation cycle."`
	WorkerMetricsInterval           time.Duration     `env:"WORKER_METRICS_INTERVAL" default:"300" unit:"seconds" min:"10" max:"86400" doc:"Interval between metrics collections of a worker."`
	CMLDefaultUsername              string            `env:"CML_DEFAULT_USERNAME" default:"admin" doc:"Default CML user of workers."`
	CMLDefaultPassword              sealed.Secret     `env:"CML_DEFAULT_PASSWORD" default:"" doc:"Default CML password of workers: file:PATH, env:NAME or the password."`
	ScaleDownEnabled                bool              `env:"SCALE_DOWN_ENABLED" default:"false" doc:"Drain idle workers instead of pausing them."`
	MinWorkers                      int               `env:"MIN_WORKERS" default:"0" max:"100000" doc:"Minimum number of running workers. Automatic actions never go below it."`
	ScaleDownCooldown               time.Duration     `env:"SCALE_DOWN_COOLDOWN_SECONDS" default:"600" unit:"seconds" max:"86400" doc:"Minimum time between two drains by scale-down."`
	ScaleDownCooldownDefersPause    bool              `env:"SCALE_DOWN_COOLDOWN_DEFERS_PAUSE" default:"true" doc:"Let idle workers wait for the cooldown. If off, they are paused without a drain."`
	DrainTimeout                    time.Duration     `env:"DRAIN_TIMEOUT_SECONDS" default:"600" unit:"seconds" max:"604800" doc:"Maximum duration of a drain."`
	ProvisioningTimeout             time.Duration     `env:"PROVISIONING_TIMEOUT_SECONDS" default:"900" unit:"seconds" min:"60" max:"86400" doc:"Time after which a launch or start counts as failed."`
	DiscoveryScanInterval           time.Duration     `env:"DISCOVERY_SCAN_INTERVAL_SECONDS" default:"300" unit:"seconds" min:"30" max:"86400" doc:"Interval between discovery scans."`
	DiscoveryRegions                []string          `env:"DISCOVERY_REGIONS" default:"" doc:"Regions to scan for instances. Empty scans aws_default_region and the regions of aws_region_configs and of workers."`
	DiscoveryAMINamePatterns        []string          `env:"DISCOVERY_AMI_NAME_PATTERNS" default:"*cml*" doc:"Image names to discover, with * and ?. A region's ami_name_pattern takes precedence."`
	DiscoveryImport                 string            `env:"DISCOVERY_IMPORT" default:"confirm" oneof:"confirm,auto,off" doc:"Import of instances discovered by image name: confirm lists them, auto imports them, off disables discovery."`
	MaxWorkersPerRegion             int               `env:"MAX_WORKERS_PER_REGION" default:"10" max:"100000" doc:"Maximum number of workers per region for scale-up."`
	TagPrefix                       string            `env:"TAG_PREFIX" default:"lull:" doc:"Prefix of all tag names."`
	AuditRetention                  time.Duration     `env:"AUDIT_RETENTION_DAYS" default:"90" unit:"days" min:"1" max:"3650" doc:"Retention of audit entries."`
	AuditMaxMiB                     int               `env:"AUDIT_MAX_MIB" default:"256" min:"1" max:"4096" doc:"Maximum size of the audit log in the store, in MiB."`
	WakeInterval                    time.Duration     `env:"WAKE_INTERVAL_SECONDS" default:"60" unit:"seconds" max:"86400" doc:"Minimum time between two wakes of a worker by token."`
	AWSDefaultRegion                string            `env:"AWS_DEFAULT_REGION" default:"us-east-1" doc:"Default region of workers."`
	AWSRegionConfigs                map[string]Region `env:"AWS_REGION_CONFIGS" default:"{}" doc:"Network settings by region: security_group_ids, subnet_id, key_name, default_tags."`

	NotifyChannels  map[string]channel.Channel `env:"NOTIFY_CHANNELS" default:"{}" doc:"Notification channels by name, of type webhook, slack or mail; docs/operations.md lists their fields."`
	NotifyPublicURL string                     `env:"NOTIFY_PUBLIC_URL" default:"" doc:"Public URL of this server. If set, warnings contain links that answer without a login, and pause notices link to the worker's page."`
	AgentServerURL  string                     `env:"AGENT_SERVER_URL" default:"" doc:"URL at which launched machines reach this server; https unless it is loopback. Required for templates with agent."`
	AgentServerCA   string                     `env:"AGENT_SERVER_CA" default:"" doc:"PEM certificates with which agents verify the server. Empty uses their system's trust store."`
	NotifyTimeZone  string                     `env:"NOTIFY_TIME_ZONE" default:"UTC" doc:"Time zone of notifications, quiet hours and the end of the day."`
	NotifyRetry     time.Duration              `env:"NOTIFY_RETRY_MINUTES" default:"1440" unit:"minutes" min:"1" max:"20160" doc:"Time for which a notification is retried before it is undeliverable."`
}

// Field describes one setting.
type Field struct {
	Key     string `json:"key"` // as in the API and the config file
	Env     string `json:"env"`
	Default string `json:"default"`
	Unit    string `json:"unit,omitempty"`
	Doc     string `json:"doc"`

	index    int
	min, max int64 // in Unit; a max of 0 means no maximum
	oneOf    []string
}

// Fields lists all settings in the order of the struct.
func Fields() []Field { return fields }

var fields = listFields()

func listFields() []Field {
	t := reflect.TypeFor[Settings]()
	out := make([]Field, t.NumField())
	for i := range out {
		tag := t.Field(i).Tag
		f := Field{Env: tag.Get("env"), Default: tag.Get("default"), Unit: tag.Get("unit"), Doc: tag.Get("doc"), index: i}
		f.Key = strings.ToLower(f.Env)
		f.min, _ = strconv.ParseInt(tag.Get("min"), 10, 64)
		f.max, _ = strconv.ParseInt(tag.Get("max"), 10, 64)
		if s := tag.Get("oneof"); s != "" {
			f.oneOf = strings.Split(s, ",")
		}
		out[i] = f
	}
	return out
}

// FieldOf returns the setting with a key.
func FieldOf(key string) (Field, bool) {
	for _, f := range fields {
		if f.Key == key {
			return f, true
		}
	}
	return Field{}, false
}

func (f Field) unit() time.Duration {
	switch f.Unit {
	case "seconds":
		return time.Second
	case "minutes":
		return time.Minute
	case "days":
		return 24 * time.Hour
	}
	return 0
}

// Validate returns every fault in the combination of settings. Each single value was
// checked when it was read.
func (s Settings) Validate() error {
	var errs []error
	if s.IdleDetectionInterval > s.WorkerActivityDetectionInterval {
		errs = append(errs, failure.Invalidf("idle_detection_interval", "%s is longer than worker_activity_detection_interval, %s",
			idle.Human(s.IdleDetectionInterval), idle.Human(s.WorkerActivityDetectionInterval)))
	}
	if s.WorkerWarnBefore > s.WorkerIdleTimeout {
		errs = append(errs, failure.Invalidf("worker_warn_before_minutes", "%s is longer than the idle timeout, %s", idle.Human(s.WorkerWarnBefore), idle.Human(s.WorkerIdleTimeout)))
	}
	if _, err := regexp.Compile(s.WorkerActivityExcludedUsers); err != nil {
		errs = append(errs, failure.Invalidf("worker_activity_excluded_user_pattern", "it is not a regular expression: %v", err))
	}
	if !regionName.MatchString(s.AWSDefaultRegion) {
		errs = append(errs, failure.Invalidf("aws_default_region", "%.40q is not the name of a region", s.AWSDefaultRegion))
	}
	if p := s.TagPrefix; p == "" || len(p) > 32 || strings.HasPrefix(p, "aws:") {
		errs = append(errs, failure.Invalidf("tag_prefix", "%.40q must have 1 to 32 bytes and not begin with aws:", p))
	}
	for _, r := range s.DiscoveryRegions {
		if !regionName.MatchString(r) {
			errs = append(errs, failure.Invalidf("discovery_regions", "%.40q is not the name of a region", r))
		}
	}
	for _, p := range s.DiscoveryAMINamePatterns {
		if p == "" || len(p) > 255 {
			errs = append(errs, failure.Invalidf("discovery_ami_name_patterns", "%.40q does not have 1 to 255 bytes", p))
		}
	}
	for name, r := range s.AWSRegionConfigs {
		if r.Region != "" && r.Region != name {
			errs = append(errs, failure.Invalidf("aws_region_configs."+name, "its region is %.40q, not the name of the entry", r.Region))
		}
		r.Region = name
		errs = append(errs, r.validate("aws_region_configs."+name))
	}
	return errors.Join(slices.Concat(errs, s.validateNotify(), s.validateEnroll())...)
}

// ScannedRegions returns the regions that discovery scans, sorted. known yields the
// regions of workers.
func (s Settings) ScannedRegions(known iter.Seq[string]) []string {
	out := slices.Clone(s.DiscoveryRegions)
	if len(out) == 0 {
		out = append(slices.AppendSeq([]string{s.AWSDefaultRegion}, known), slices.Collect(maps.Keys(s.AWSRegionConfigs))...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Region returns the configuration of a region, or of the default region if name is
// empty; false if there is none.
func (s Settings) Region(name string) (Region, bool) {
	if name == "" {
		name = s.AWSDefaultRegion
	}
	r, ok := s.AWSRegionConfigs[name]
	r.Region = name
	return r, ok
}

// format returns the value of f in s as text or number, in the setting's own unit.
// For a secret it returns only its kind.
func (f Field) format(s *Settings) any {
	switch v := reflect.ValueOf(s).Elem().Field(f.index).Interface().(type) {
	case time.Duration:
		return int64(v / f.unit())
	case sealed.Secret:
		return v.String()
	default:
		return v
	}
}

// set parses raw, a value from text, JSON or YAML, and stores it in f of s.
func (f Field) set(s *Settings, raw any) error {
	v := reflect.ValueOf(s).Elem().Field(f.index)
	bad := func(want string) error { return failure.Invalidf(f.Key, "%.60q is not %s", fmt.Sprint(raw), want) }
	switch v.Interface().(type) {
	case time.Duration, int:
		n, err := asInt(raw)
		if err != nil {
			return bad("a whole number")
		}
		if n < f.min || f.max > 0 && n > f.max {
			return failure.Invalidf(f.Key, "%d is not between %d and %d", n, f.min, f.max)
		}
		if u := f.unit(); u > 0 {
			n *= int64(u)
		}
		v.SetInt(n)
	case bool:
		b, err := strconv.ParseBool(strings.ToLower(fmt.Sprint(raw)))
		if err != nil {
			return bad("true or false")
		}
		v.SetBool(b)
	case sealed.Secret:
		t, ok := raw.(string)
		if !ok || len(t) > 4096 {
			return failure.Invalidf(f.Key, "must be text of at most 4096 bytes")
		}
		v.SetString(t)
	case string:
		t, ok := raw.(string)
		if !ok || len(t) > 4096 {
			return bad("a text of at most 4096 bytes")
		}
		if len(f.oneOf) > 0 && !containsString(f.oneOf, t) {
			return bad("one of " + strings.Join(f.oneOf, ", "))
		}
		v.SetString(t)
	case []string:
		list, err := asStrings(raw)
		if err != nil {
			return bad("a list of names")
		}
		v.Set(reflect.ValueOf(list))
	case map[string]Region:
		m, err := asRegions(raw)
		if err != nil {
			return failure.Invalidf(f.Key, "%v", err)
		}
		v.Set(reflect.ValueOf(m))
	case map[string]channel.Channel:
		m, err := asChannels(raw)
		if err != nil {
			return failure.Invalidf(f.Key, "%v", err)
		}
		v.Set(reflect.ValueOf(m))
	}
	return nil
}

// validateNotify returns every fault of the notification settings.
func (s Settings) validateNotify() []error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(s.NotifyChannels)) {
		at := "notify_channels." + name
		if err := failure.CheckName(at, name); err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, s.NotifyChannels[name].Validate(at))
	}
	if s.NotifyPublicURL != "" {
		u, err := url.Parse(s.NotifyPublicURL)
		if channel.CheckAddress(s.NotifyPublicURL) != nil || err != nil || u.RawQuery != "" || strings.HasSuffix(u.Path, "/") {
			errs = append(errs, failure.Invalidf("notify_public_url", "%.80q is not the address of a server, such as https://lull.example.com", s.NotifyPublicURL))
		}
	}
	if _, err := time.LoadLocation(s.NotifyTimeZone); err != nil {
		errs = append(errs, failure.Invalidf("notify_time_zone", "%.40q is not a time zone such as Europe/Berlin", s.NotifyTimeZone))
	}
	return errs
}

// Zone returns the zone of NOTIFY_TIME_ZONE.
func (s Settings) Zone() *time.Location {
	if z, err := time.LoadLocation(s.NotifyTimeZone); err == nil {
		return z
	}
	return time.UTC
}

// validateEnroll returns every fault of the settings of enrollment.
func (s Settings) validateEnroll() (errs []error) {
	if s.AgentServerURL != "" {
		u, err := url.Parse(s.AgentServerURL)
		switch {
		case channel.CheckAddress(s.AgentServerURL) != nil || err != nil || u.RawQuery != "" || strings.HasSuffix(u.Path, "/") || strings.ContainsAny(s.AgentServerURL, "'\"\\ \n@"):
			errs = append(errs, failure.Invalidf("agent_server_url", "%.80q is not the address of a server, such as https://lull.example.com:7070", s.AgentServerURL))
		case u.Scheme != "https" && !net.ParseIP(u.Hostname()).IsLoopback():
			errs = append(errs, failure.Invalidf("agent_server_url", "%.80q is not https: an agent sends its token there", s.AgentServerURL))
		}
	}
	if s.AgentServerCA != "" && (len(s.AgentServerCA) > 8<<10 || strings.Contains(s.AgentServerCA, "LULL_END") || !x509.NewCertPool().AppendCertsFromPEM([]byte(s.AgentServerCA))) {
		errs = append(errs, failure.Invalidf("agent_server_ca", "must be PEM certificates, at most 8 KiB in all"))
	}
	return errs
}

// Base returns the settings as the weakest layer of every policy.
func (s Settings) Base() policy.Base {
	return policy.Base{Timeout: s.WorkerIdleTimeout, WarnBefore: s.WorkerWarnBefore, CheckInterval: s.IdleDetectionInterval,
		Snooze: s.WorkerAutoPauseSnooze, AutoPause: s.WorkerAutoPauseEnabled}
}

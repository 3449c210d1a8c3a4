package cml

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// userActivity is the category whose events are filtered by user.
const userActivity = "user_activity"

// relevantByDefault are the categories that count as activity: all changes of
// labs and nodes, packet captures, and requests of users.
var relevantByDefault = []string{
	"start_lab", "stop_lab", "create_lab", "import_lab", "export_lab", "wipe_lab", "delete_lab",
	"start_node", "stop_node", "queue_node", "boot_node", "wipe_node", "packet_capture",
	userActivity,
}

// documented are the categories in the API description of CML 2.9.
var documented = []string{
	"start_lab", "stop_lab", "queue_node", "stop_node", "start_node", "boot_node", "wipe_node",
	"packet_capture", "license_info", "maintenance_state_change", "notice_state_change",
	"running_nodes", "resource_pool", userActivity, "user_group", "system_stats", "blkinfo",
	"vmware", "dmiinfo", "cpuinfo", "meminfo", "hypervisor", "import_lab", "export_lab", "aaa_info",
}

// DefaultExcludedUsers matches the ids of CML's built-in accounts.
const DefaultExcludedUsers = `^00000000-0000-.*`

// FilterConfig configures which telemetry events are activity and what is kept.
type FilterConfig struct {
	// Categories are the relevant categories; nil means the defaults.
	Categories []string
	// ExcludedUsers matches (anywhere, unless anchored) the data.user_id of
	// user_activity events that are not activity; nil excludes no user. An event
	// whose user_id is missing or not a string counts as activity.
	ExcludedUsers *regexp.Regexp
	// ExcludedIDs are user IDs to exclude by exact match, such as our own
	// account's.
	ExcludedIDs []string
	// MaxStored is the number of events kept, 0 to 1000.
	MaxStored int
	// MaxEventBytes bounds the length of an event whose data is read and kept, 1
	// to 1 MiB; 0 means 16 KiB. A longer event is counted as oversized. Its
	// category and time still count; its data is ignored.
	MaxEventBytes int
	// MaxBytes bounds the answer; 0 means 4 GiB.
	MaxBytes int64
	// FutureAfter is how far in the future an event must be dated to count as
	// future-dated; 0 means 60 s.
	FutureAfter time.Duration
	// MaxFuture bounds Seen; 0 means 128. A future-dated event that does not fit
	// counts as activity whenever it is seen.
	MaxFuture int
}

// Filter reads telemetry histories. It is safe for concurrent use.
type Filter struct {
	cfg         FilterConfig
	categories  map[string]*category
	names       []string // by category.index
	excludedIDs map[string]bool
	buffers     sync.Pool // of *[]byte
}

// category is a known category.
type category struct {
	name     string
	index    int
	relevant bool
	byUser   bool
}

// NewFilter checks cfg and returns a filter.
func NewFilter(cfg FilterConfig) (*Filter, error) {
	if cfg.Categories == nil {
		cfg.Categories = relevantByDefault
	}
	cfg.MaxEventBytes = cmp.Or(cfg.MaxEventBytes, 16<<10)
	cfg.MaxBytes = cmp.Or(cfg.MaxBytes, 4<<30)
	cfg.FutureAfter = cmp.Or(cfg.FutureAfter, time.Minute)
	cfg.MaxFuture = cmp.Or(cfg.MaxFuture, 128)
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	f := &Filter{cfg: cfg, categories: map[string]*category{}, excludedIDs: map[string]bool{}}
	for _, name := range slices.Concat(documented, relevantByDefault, cfg.Categories) {
		if f.categories[name] == nil {
			f.categories[name] = &category{name: name, index: len(f.names), byUser: name == userActivity}
			f.names = append(f.names, name)
		}
	}
	for _, name := range cfg.Categories {
		f.categories[name].relevant = true
	}
	for _, id := range cfg.ExcludedIDs {
		f.excludedIDs[id] = true
	}
	size := max(64<<10, cfg.MaxEventBytes+4*minRead)
	f.buffers.New = func() any { b := make([]byte, size); return &b }
	return f, nil
}

func (c FilterConfig) validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf("cannot use telemetry filter: "+format, args...))
		}
	}
	for _, name := range c.Categories {
		check(name != "" && len(name) <= maxShort/4, "categories: %q is empty or longer than %d bytes", name, maxShort/4)
	}
	check(c.MaxStored >= 0 && c.MaxStored <= 1000, "max stored: %d is not in 0..1000", c.MaxStored)
	check(c.MaxEventBytes >= 1 && c.MaxEventBytes <= 1<<20, "max event bytes: %d is not in 1..1048576", c.MaxEventBytes)
	check(c.MaxBytes >= 1, "max bytes: %d is not positive", c.MaxBytes)
	check(c.FutureAfter > 0, "future after: %v is not positive", c.FutureAfter)
	check(c.MaxFuture >= 1, "max future: %d is not positive", c.MaxFuture)
	return errors.Join(errs...)
}

// Read scans one history. now is our time when the answer began, offset is how
// far the host's clock is ahead of ours, and seen is what the last reading of the
// same worker returned. Memory use does not depend on the length of the history.
//
// The result is as of now. Every failure is reported as an unknown result: if the
// history could not be read to its end, or if the offset is unknown.
func (f *Filter) Read(r io.Reader, now time.Time, offset Offset, seen Seen) Activity {
	a := f.read(r, now, offset, seen)
	a.seal(now)
	return a
}

// read is Read without the limit that seal sets on the newest activity.
func (f *Filter) read(r io.Reader, now time.Time, offset Offset, seen Seen) Activity {
	buf := f.buffers.Get().(*[]byte)
	defer f.buffers.Put(buf)
	p := newPass(f, now, offset, seen)
	p.in.reset(r, *buf, f.cfg.MaxEventBytes, f.cfg.MaxBytes)
	return p.result(p.array())
}

// reasonOf maps the errors of the scanner to reasons.
func reasonOf(err error) Reason {
	var syntax *syntaxError
	switch {
	case err == nil:
		return ReasonNone
	case errors.Is(err, errTooLarge):
		return ReasonTooLarge
	case errors.Is(err, errTruncated), errors.Is(err, io.ErrUnexpectedEOF):
		return ReasonTruncated
	case errors.As(err, &syntax):
		return ReasonMalformed
	default:
		return ReasonUnreachable
	}
}

// sample returns the beginning of an invalid event, made printable.
func sample(event []byte) string {
	const most = 160
	cut := event[:min(len(event), most)]
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(string(cut), "?"))
}

package worker

import (
	"fmt"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
)

// Observable lists what a probe of a machine can observe.
type Observable struct {
	// CML means that a CML answers at the machine's address. CMLDetail is its
	// version, or why none was found.
	CML       bool
	CMLDetail string
	// Agent means that the machine's agent reports to this fleet.
	Agent bool
	// Up is how long the machine has been running; negative if it is not running.
	Up time.Duration
	// Patience is how long CML is given to start before the machine counts as one
	// without CML.
	Patience time.Duration
}

// Choose returns the activity sources for the machine, and the reason for the choice.
// If it returns none, the machine must be probed again later.
func (o Observable) Choose() (sources []string, reason string) {
	var why []string
	if o.CML {
		sources, why = append(sources, SourceCML), append(why, "cml: "+o.CMLDetail)
	}
	if o.Agent {
		sources, why = append(sources, SourceAgent), append(why, "agent: its agent reports to this fleet")
	}
	switch {
	case o.CML:
	case o.Up < 0:
		return nil, "not detected yet: the machine is not running, and is probed once it is"
	case o.Up < o.Patience:
		return nil, fmt.Sprintf("not detected yet: the machine has been running for %s, and a CML may take %s to answer (%s)", idle.Human(o.Up), idle.Human(o.Patience), o.CMLDetail)
	case !o.Agent:
		sources, why = append(sources, SourceCloudWatch), append(why, "cloudwatch: no CML was found ("+o.CMLDetail+") and no agent reports")
	}
	return sources, strings.Join(why, "; ")
}

// SetSources records the result of Choose.
func (w *Worker) SetSources(sources []string, reason string) {
	w.ActivitySources, w.ActivitySourcesReason, w.DetectSources = sources, reason, len(sources) == 0
}

// SourcesGiven reports whether a user chose the activity sources in p, for example by
// a policy, rather than the default.
func SourcesGiven(p *policy.Resolved) bool {
	return p.From["activity_sources"].Layer != policy.LayerSettings
}

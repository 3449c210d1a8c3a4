package worker

import (
	"fmt"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
)

// Observable lists what can be observed of a machine, as far as it was probed.
type Observable struct {
	// CML reports that a CML answers at the machine's address. CMLDetail is its
	// version, or why none was found.
	CML       bool
	CMLDetail string
	// Agent reports that the machine's agent reports to this fleet.
	Agent bool
	// Up is for how long the machine has been running; negative if it is not.
	Up time.Duration
	// Patience is the time limit for an answer of CML.
	Patience time.Duration
}

// Choose returns the activity sources that fit and why. Without sources the
// machine has to be probed again later.
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

// SetSources records what Choose returned.
func (w *Worker) SetSources(sources []string, reason string) {
	w.ActivitySources, w.ActivitySourcesReason, w.DetectSources = sources, reason, len(sources) == 0
}

// SourcesGiven reports whether p takes the activity sources from a user's
// choice, such as a policy, and not from the default.
func SourcesGiven(p *policy.Resolved) bool {
	return p.From["activity_sources"].Layer != policy.LayerSettings
}

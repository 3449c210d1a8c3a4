package power

// Reason is why a worker was paused. The set is closed.
type Reason string

// The reasons of a pause.
const (
	ReasonIdleTimeout Reason = "idle_timeout"
	ReasonManual      Reason = "manual"
	ReasonExternal    Reason = "external"
	ReasonSchedule    Reason = "schedule"
	ReasonTTL         Reason = "ttl"
	ReasonScaleDown   Reason = "scale_down"
)

// Automatic reports whether lull itself decided the pause, so that it counts in
// auto_pause_count.
func (r Reason) Automatic() bool {
	return r == ReasonIdleTimeout || r == ReasonSchedule || r == ReasonTTL || r == ReasonScaleDown
}

// ByIdleness reports whether the pause is based on readings. They are then read
// again right before the call.
func (r Reason) ByIdleness() bool { return r == ReasonIdleTimeout || r == ReasonScaleDown }

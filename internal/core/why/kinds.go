package why

import "lull/internal/core/idle"

// Kind is a kind of fact or remedy: its code in the API, and its sentence. In the
// sentence, {by} and {at} stand for the actor and the time, and there is one fmt
// verb for each further detail.
type Kind struct {
	Code idle.Code
	text string
}

// Facts about a running object.
var (
	Expires     = Kind{"expiry", "%s"}
	AboutTo     = Kind{"about_to_pause", "It has been idle for %s and is about to be %s."}
	NotBefore   = Kind{"not_before", "It is paused at {at}, in %s, at the earliest: others may be waiting for the same budget."}
	Pauses      = Kind{"pause_at", "Without activity it is paused at {at}, in %s."}
	NextCheck   = Kind{"next_check", "The next check is at {at}."}
	CalledOff   = Kind{"stop_called_off", "%s"}
	CloudUnread = Kind{"cloud_unread", "%s."}
	Completion  = Kind{"completion", "Its completion (%s) will %s it at {at}. Undo that with: lull agent complete --undo."}
	LastAction  = Kind{"last_action", "The last action was a %s because of %s at {at}: %s %s."}
	BootedAnew  = Kind{"booted_anew", "It was booted instead of restored: %s."}
	Trouble     = Kind{"trouble", "Something keeps it from working: %s."}
	LetRun      = Kind{"let_run", "It was asleep, and %s; lull noticed at {at}."}
	Restarted   = Kind{"restarted", "It was restarted: %s."}
	Misset      = Kind{"misset", "Its settings conflict with the host's: %s."}
)

// Facts about how an object came into its state.
var (
	InState     = Kind{"in_state", "It has been %s since {at}: %s."}
	WasInState  = Kind{"was_in_state", "It was %s at {at}."}
	SinceThen   = Kind{"was_in_state", "It had been %s since {at}, by {by}: %s."}
	Stopped     = Kind{"stopped", "{by} stopped it at {at} (%s)."}
	Paused      = Kind{"paused", "It was paused by {by} at {at}: %s."}
	StopAsked   = Kind{"stop_asked", "{by} requested it at {at} (%s); it is %s."}
	StartAsked  = Kind{"start_asked", "It is %s, and will then be started for {by}%s."}
	ToStart     = Kind{"to_start", "It will be started for {by}%s."}
	ComingUp    = Kind{"coming_up", "It has been %s since {at}%s."}
	Withdrawn   = Kind{"start_withdrawn", "{by} canceled its start at {at}."}
	FirstSeen   = Kind{"first_seen", "It was %s when lull first saw it."}
	Failed      = Kind{"failed", "Since {at}%s. Retry it or terminate it."}
	Since       = Kind{"since", "Since {at}%s."}
	Terminated  = Kind{"terminated", "{by} terminated it; EC2 reported it terminated at {at}."}
	Gone        = Kind{"gone", "It has been gone since {at}%s."}
	Rested      = Kind{"rested", "It has been stopped for %s."}
	Saved       = Kind{"rested", "It has been stopped for %s, which saved $%.2f so far."}
	UnderPolicy = Kind{"policy", "The policy was %s."}
	WasIdle     = Kind{"was_idle", "It had been idle for %s; %s pauses after %s."}
	Scheduled   = Kind{"schedule", "It was %s."}
	Unborn      = Kind{"not_known_then", "lull did not know it yet: it was %s at {at} by {by}."}

	StopsUnused  = Kind{"stop_at", "It is stopped at {at} unless it is used first."}
	StopsDeaf    = Kind{"stop_at", "It is stopped at {at} unless it is used first. After that, a connection does not start it: %s."}
	StopsOpen    = Kind{"stop_at", "It is stopped at {at} unless a new connection arrives. Until then %s, which counts as use."}
	KeptOpen     = Kind{"connection_open", "It is not stopped automatically while %s, because a stop would close them."}
	Deaf         = Kind{"connection_does_not_start", "A connection does not start it: %s."}
	Disabled     = Kind{"disabled", "It is disabled: only a manual start resumes it."}
	Waiting      = Kind{"waiting", "It was requested at {at} and is queued at position %d until %s: %s."}
	Unreached    = Kind{"unavailable", "It was %s, and %s. It is retried automatically."}
	NoRuntime    = Kind{"unavailable", "It was %s, and nothing can be done with it: %s."}
	Unknown      = Kind{"unknown", "Unknown. %s"}
	Unrecorded   = Kind{"not_recorded", "No check at or before that time is recorded."}
	StaleCheck   = Kind{"stale_check", "Unknown: the last recorded check was at {at}, and the next was due at %s. At that check: %s"}
	EarlierCheck = Kind{"earlier_check", "As of the check at {at}: %s"}
	LastState    = Kind{"last_report", "%s is %s."}
	LastReason   = Kind{"last_report", "%s."}
)

// Remedies: what would change the state of an object.
var (
	Prolong     = Kind{"expiry", "to move its expiry: %s"}
	Stay        = Kind{"stay", "to keep it running past {at}: use it, hold a lease, or: %s"}
	Ends        = Kind{"", "%s ends at {at}"}
	PolicyFault = Kind{"policy_fault", "%s"}
	Forget      = Kind{"forget", "to remove its record without confirmation from EC2: lull worker forget %s --force%s"}
	Frozen      = Kind{"freeze", "%s"}
	NoBudget    = Kind{"budget", "%s"}
	Overdue     = Kind{"expiry", "%s"}
	Opens       = Kind{"schedule", "%s%s"}
	Start       = Kind{"start", "%s at any time: lull worker start %s"}
	Snooze      = Kind{"snooze", "to keep it running then: lull worker snooze %s"}
	Resume      = Kind{"resume", "%slull resume %s"}
	StartOne    = Kind{"start", "%slull start %s"}
	EndRun      = Kind{"stop", "its run answers again, or you end it with: lull stop %s"}
	MakeRoom    = Kind{"room", "other instances sleep or are stopped, or the host gets more memory or concurrent boots"}
	AddRuntime  = Kind{"runtime", "the host is started with that runtime again"}
)

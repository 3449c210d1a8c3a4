package cml

import (
	"encoding/json"
	"time"
)

// Reason is why the absence of telemetry events does not prove quiet. The set is
// closed; the empty Reason means that the whole history was read and understood.
type Reason string

// The reasons for an unknown telemetry signal.
const (
	ReasonNone          Reason = ""
	ReasonUnreachable   Reason = "unreachable"          // no answer, or the connection broke
	ReasonUnauthorized  Reason = "unauthorized"         // CML refused our credentials
	ReasonRefused       Reason = "refused"              // CML answered with another error
	ReasonNotOptedIn    Reason = "not_opted_in"         // CML may not collect events at all
	ReasonOptInUnknown  Reason = "opt_in_unreadable"    // the opt-in could not be read
	ReasonMalformed     Reason = "malformed"            // the answer is not a JSON array
	ReasonTruncated     Reason = "truncated"            // the array ends before its bracket
	ReasonTooLarge      Reason = "too_large"            // the answer exceeds MaxBytes
	ReasonOffsetUnknown Reason = "clock_offset_unknown" // the host's clock cannot be compared with ours
)

// Event is a relevant telemetry event as CML sent it.
type Event struct {
	Category string `json:"category"`
	// Timestamp is in the host's own clock, in UTC.
	Timestamp time.Time `json:"timestamp"`
	// Data is the raw JSON of the event's data, nil if it had none.
	Data json.RawMessage `json:"data,omitempty"`
	// DataDropped reports that the event was longer than MaxEventBytes, so that
	// its data was not kept.
	DataDropped bool `json:"data_dropped,omitempty"`
	// At is when the event happened by our clock: corrected by the host's offset
	// or, for a future-dated event, when it was first seen.
	At time.Time `json:"-"`
}

// Fault describes one malformed event that was skipped.
type Fault struct {
	Offset int64  `json:"offset"` // byte offset in the answer
	Fault  string `json:"fault"`
	Sample string `json:"sample,omitempty"` // the beginning of the event
}

// Counts are the counters of one scan of a history.
type Counts struct {
	Bytes  int64 `json:"bytes"`  // size of the answer read
	Events int64 `json:"events"` // elements of the array
	// ByCategory counts well-formed events in categories that CML documents or
	// the configuration names.
	ByCategory map[string]int64 `json:"by_category,omitempty"`
	// UnknownCategories counts the others by name. After the first
	// maxUnknownNames names, further ones are counted in UnknownOther.
	UnknownCategories map[string]int64 `json:"unknown_categories,omitempty"`
	UnknownOther      int64            `json:"unknown_other,omitempty"`
	Relevant          int64            `json:"relevant"`                   // events that count as activity
	ExcludedUsers     int64            `json:"excluded_users,omitempty"`   // user_activity of excluded users
	Malformed         int64            `json:"malformed,omitempty"`        // skipped, see Faults
	Oversized         int64            `json:"oversized,omitempty"`        // longer than MaxEventBytes
	Duplicates        int64            `json:"duplicates,omitempty"`       // repeats of an event kept at that time
	Future            int64            `json:"future,omitempty"`           // relevant, dated after now + FutureAfter
	FutureForgotten   int64            `json:"future_forgotten,omitempty"` // future-dated events beyond the capacity of Seen
}

// Activity is the evidence from one telemetry reading for the idle engine.
//
// If Unknown is set, the absence of activity proves nothing: the caller must
// treat the signal as unknown. Newest and Recent are still true activity, but
// may be incomplete.
type Activity struct {
	// CheckedAt is when the answer had been read completely, by our clock.
	CheckedAt time.Time `json:"checked_at"`
	// Unknown is empty when the whole history was read.
	Unknown Reason `json:"unknown,omitempty"`
	// Err is the cause of Unknown.
	Err error `json:"-"`
	// Newest is the time, by our clock, of the newest relevant event in the whole
	// history. It is never later than CheckedAt, and is zero if there is no such
	// event or the offset is unknown. Within the bounds of the offset, the latest
	// possible time is used. A Client keeps those bounds while it can. With other
	// bounds (another client, another process) Newest can move by up to a second
	// plus the round trip although no event was added; NewestHost does not.
	Newest time.Time `json:"newest"`
	// NewestHost is the unconverted timestamp of the event behind Newest.
	NewestHost time.Time `json:"newest_host"`
	// Recent holds the newest relevant events, newest first, at most MaxStored.
	Recent []Event `json:"recent,omitempty"`
	Counts Counts  `json:"counts"`
	// Faults describes the first few malformed events.
	Faults []Fault `json:"faults,omitempty"`
	Offset Offset  `json:"offset"`
	// Seen must be passed to the next reading of the same worker.
	Seen Seen `json:"seen,omitempty"`
}

// seal moves Newest back to end, the time at which the answer was complete, if it
// is later.
func (a *Activity) seal(end time.Time) {
	a.CheckedAt = end
	if a.Newest.After(end) {
		a.Newest = end
	}
	for i := range a.Recent {
		if a.Recent[i].At.After(end) {
			a.Recent[i].At = end
		}
	}
}

// Seen contains the future-dated events seen before, so that each counts as
// activity once. Its size is limited by the filter's MaxFuture.
type Seen []SeenEvent

// SeenEvent is one future-dated event.
type SeenEvent struct {
	// Digest identifies the event by its category, timestamp and data.
	Digest string `json:"digest"`
	// FirstSeen is when it was first seen, by our clock.
	FirstSeen time.Time `json:"first_seen"`
}

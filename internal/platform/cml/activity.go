package cml

import (
	"encoding/json"
	"time"
)

// A Reason says why telemetry cannot be believed to be quiet. The set is closed;
// the empty Reason means that the whole history was read and understood.
type Reason string

// The reasons for an unknown telemetry signal.
const (
	ReasonNone          Reason = ""
	ReasonUnreachable   Reason = "unreachable"          // no answer, or it broke off below HTTP
	ReasonUnauthorized  Reason = "unauthorized"         // CML refused our credentials
	ReasonRefused       Reason = "refused"              // CML answered with another error
	ReasonNotOptedIn    Reason = "not_opted_in"         // CML may not collect events at all
	ReasonOptInUnknown  Reason = "opt_in_unreadable"    // the opt-in could not be read
	ReasonMalformed     Reason = "malformed"            // the answer is not a JSON array
	ReasonTruncated     Reason = "truncated"            // the array ends before its bracket
	ReasonTooLarge      Reason = "too_large"            // the answer exceeds MaxBytes
	ReasonOffsetUnknown Reason = "clock_offset_unknown" // the host's clock cannot be compared with ours
)

// An Event is a relevant telemetry event as CML sent it.
type Event struct {
	Category string `json:"category"`
	// Timestamp is the time by the host's own clock, in UTC.
	Timestamp time.Time `json:"timestamp"`
	// Data is the raw JSON of the event's data, nil when it had none.
	Data json.RawMessage `json:"data,omitempty"`
	// DataDropped says that the event was longer than MaxEventBytes, so that
	// its data was not kept.
	DataDropped bool `json:"data_dropped,omitempty"`
	// At is when the event happened by our clock: corrected by the host's
	// offset, for a future-dated event the time of its first sight.
	At time.Time `json:"-"`
}

// A Fault is one malformed event that was skipped.
type Fault struct {
	Offset int64  `json:"offset"` // byte offset in the answer
	Fault  string `json:"fault"`
	Sample string `json:"sample,omitempty"` // the beginning of the event
}

// Counts says what the scan of one history met.
type Counts struct {
	Bytes  int64 `json:"bytes"`  // size of the answer read
	Events int64 `json:"events"` // elements of the array
	// ByCategory counts well-formed events of categories that CML documents or
	// the configuration names.
	ByCategory map[string]int64 `json:"by_category,omitempty"`
	// UnknownCategories counts the others by name; names met after the first
	// maxUnknownNames are summed up in UnknownOther.
	UnknownCategories map[string]int64 `json:"unknown_categories,omitempty"`
	UnknownOther      int64            `json:"unknown_other,omitempty"`
	Relevant          int64            `json:"relevant"`                   // events that count as activity
	ExcludedUsers     int64            `json:"excluded_users,omitempty"`   // user_activity of excluded users
	Malformed         int64            `json:"malformed,omitempty"`        // skipped, see Faults
	Oversized         int64            `json:"oversized,omitempty"`        // longer than MaxEventBytes
	Duplicates        int64            `json:"duplicates,omitempty"`       // repeats of an event kept at that moment
	Future            int64            `json:"future,omitempty"`           // relevant, dated later than now + FutureAfter
	FutureForgotten   int64            `json:"future_forgotten,omitempty"` // future-dated beyond what Seen can hold
}

// Activity is the evidence that one telemetry reading gives to the idle engine.
//
// If Unknown is set, the absence of activity says nothing: the caller must treat
// the signal as unknown. What Newest and Recent hold is still true activity,
// only perhaps not all of it.
type Activity struct {
	// CheckedAt is when the answer had been read completely, by our clock.
	CheckedAt time.Time `json:"checked_at"`
	// Unknown is empty when the whole history was read.
	Unknown Reason `json:"unknown,omitempty"`
	// Err is the cause of Unknown.
	Err error `json:"-"`
	// Newest is the time of the newest relevant event over the whole array by
	// our clock, never later than CheckedAt; zero if there is none or if the
	// offset is unknown. It is the latest time that the offset's bounds allow.
	// A Client keeps those while it can; with other bounds (another client,
	// another process) it moves by a second and the round trip, though no event
	// was added; NewestHost does not.
	Newest time.Time `json:"newest"`
	// NewestHost is the timestamp that the event behind Newest carries.
	NewestHost time.Time `json:"newest_host"`
	// Recent holds the newest relevant events, newest first, at most MaxStored.
	Recent []Event `json:"recent,omitempty"`
	Counts Counts  `json:"counts"`
	// Faults describes the first few malformed events.
	Faults []Fault `json:"faults,omitempty"`
	Offset Offset  `json:"offset"`
	// Seen is to be handed to the next reading of the same worker.
	Seen Seen `json:"seen,omitempty"`
}

// seal bounds Newest by the time at which the answer was complete.
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

// Seen remembers the future-dated events that were met before, so that each
// counts as activity once. Its size is bounded by the filter's MaxFuture.
type Seen []SeenEvent

// A SeenEvent is the memory of one future-dated event.
type SeenEvent struct {
	// Digest identifies the event by its category, timestamp and data.
	Digest string `json:"digest"`
	// FirstSeen is when it was met first, by our clock.
	FirstSeen time.Time `json:"first_seen"`
}

package worker

import (
	"encoding/json"
	"time"
)

// Telemetry is the result of reading a worker's CML history once.
type Telemetry struct {
	CheckedAt  time.Time       // when the complete answer had been read
	Unknown    string          // why quiet is not proven; empty if it is
	Newest     time.Time       // time of the newest relevant activity by our clock; zero if there is none
	Recent     []Event         // newest first; may be incomplete if Unknown is set
	Seen       json.RawMessage // state for the next reading
	Future     int64           // number of future-dated events
	Malformed  int64
	Categories map[string]int64 // number of events by unknown category
}

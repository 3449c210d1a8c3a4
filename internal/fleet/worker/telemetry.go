package worker

import (
	"encoding/json"
	"time"
)

// Telemetry is one reading of a worker's CML history.
type Telemetry struct {
	CheckedAt  time.Time       // when the complete answer had been read
	Unknown    string          // why it does not prove quiet; empty if it does
	Newest     time.Time       // newest relevant activity by our clock; zero for none
	Recent     []Event         // newest first; perhaps not all of them if Unknown is set
	Seen       json.RawMessage // state for the next reading
	Future     int64           // number of future-dated events
	Malformed  int64
	Categories map[string]int64 // unknown ones
}

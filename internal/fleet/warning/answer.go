package warning

import (
	"crypto/hmac"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/policy/when"
	"lull/internal/core/power"
	"lull/internal/fleet/sealed"
)

// Answers to a warning, as named in its links.
const (
	Extend   = "extend"    // another hour of protection or, for a ttl_deadline, before the deadline
	Stop     = "stop"      // stop now
	NotToday = "not-today" // keep running until midnight in NOTIFY_TIME_ZONE, like a keep override without an end
)

// Answers returns all answers in the order in which they are offered.
func Answers() []string { return []string{Extend, NotToday, Stop} }

// Answer is the content of a link in a warning. It is valid until the warning ends.
// Any answer, activity and the pause itself end the warning, and with it all its
// links.
type Answer struct {
	WorkerID string    `json:"w"`
	Verb     string    `json:"v"` // one of the Answer constants
	WarnedAt time.Time `json:"a"`
	PauseAt  time.Time `json:"p"`
	Channel  string    `json:"c,omitempty"` // channel by which the warning was sent, for the record
}

// linkGrace is how long after the planned pause a link is still accepted.
const linkGrace = 15 * time.Minute

// token returns a as text: its fields and a signature of them.
func (a Answer) token(s *sealed.Sealer) (string, error) {
	body, err := json.Marshal(a)
	if err != nil {
		return "", fmt.Errorf("cannot sign a link: %w", err)
	}
	text := base64.RawURLEncoding.EncodeToString(body)
	return text + "." + base64.RawURLEncoding.EncodeToString(s.MAC(text)), nil
}

// Until returns until when a protects the worker; zero if a stops it.
func (a Answer) Until(now time.Time, zone *time.Location) time.Time {
	switch a.Verb {
	case Extend:
		if a.PauseAt.After(now) {
			now = a.PauseAt
		}
		return now.Add(time.Hour)
	case NotToday:
		return when.Midnight(now, zone)
	}
	return time.Time{}
}

// Answers returns the answers that the links of the warning may give. No snooze
// delays a ttl_deadline: Extend moves the deadline, and it is the only answer for a
// worker that is already stopped.
func (x *Warning) Answers() []string {
	switch {
	case x.Reason == power.ReasonTTL && x.Stopped:
		return []string{Extend}
	case x.Reason == power.ReasonTTL:
		return []string{Extend, Stop}
	}
	return Answers()
}

// Links returns the links that answer x, by verb, below the server's base URL. like
// is an Answer without Verb and PauseAt. Links returns nil if base is empty or seal
// is nil.
func (x *Warning) Links(base string, seal *sealed.Sealer, like Answer) map[string]string {
	if base == "" || seal == nil {
		return nil
	}
	out := map[string]string{}
	for _, verb := range x.Answers() {
		like.Verb, like.PauseAt = verb, x.PauseAt.UTC()
		token, err := like.token(seal)
		if err != nil {
			return nil
		}
		out[verb] = base + "/answer/" + token
	}
	return out
}

// Read verifies the token of a link. If the token is foreign, modified or expired,
// the error is NotFound without further detail.
func Read(seal *sealed.Sealer, now time.Time, token string) (Answer, error) {
	none := &failure.NotFound{Kind: "link", Name: token[:min(len(token), 8)] + "..."}
	text, sig, ok := strings.Cut(token, ".")
	if !ok || len(token) > 2048 || seal == nil {
		return Answer{}, none
	}
	given, err := base64.RawURLEncoding.DecodeString(sig)
	if err != nil || !hmac.Equal(given, seal.MAC(text)) {
		return Answer{}, none
	}
	body, err := base64.RawURLEncoding.DecodeString(text)
	var a Answer
	if err != nil || json.Unmarshal(body, &a) != nil || !slices.Contains(Answers(), a.Verb) {
		return Answer{}, none
	}
	if now.After(a.PauseAt.Add(linkGrace)) {
		return Answer{}, none
	}
	return a, nil
}

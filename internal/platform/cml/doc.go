// Package cml is a client of Cisco Modeling Labs (CML), the program that runs
// on every worker of the fleet.
//
// It has two parts. Client is a client of CML's REST API, about a dozen calls,
// each limited in time and size. Filter reads a telemetry history, an array of
// events that only ever grows, as a stream in a fixed buffer. It produces the
// evidence for the idle engine: the time of the last activity, the last few
// events, and whether activity can be known at all.
//
// Guarantees. A history that is damaged, truncated, unreachable, not collected
// (no opt-in) or not comparable in time (no offset) is an unknown signal with a
// Reason, never a quiet one. Memory use does not grow with the history.
// Activity is the newest relevant event of the whole array, whatever the order
// of arrival, and never appears older than it is. Credentials are sent only
// over TLS that was verified, pinned or explicitly left unverified. They are
// never sent to the target of a redirect and never appear in an error.
//
// What idleness means (package idle), when to ask, and how to act on the answer
// is decided elsewhere. The package keeps no state except the session token;
// the caller stores the future-dated events between readings, as Seen.
package cml

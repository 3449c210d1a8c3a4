// Package cml speaks to the controller of Cisco Modeling Labs (CML), the
// program that runs on every worker of the fleet.
//
// It has two halves. Client is a client of CML's REST API, about a dozen calls,
// each limited in time and size. Filter reads a telemetry history, an array of
// events that only ever grows, as a stream in a fixed buffer, and makes of it
// the evidence for the idle engine: the time of the last activity, the last few
// events, and whether activity can be known at all.
//
// Guarantees. A history that is damaged, cut short, unreachable, not collected
// (no opt-in) or not comparable in time (no offset) is an unknown signal with a
// Reason, never a quiet one. Memory does not grow with the history. Activity is
// the newest relevant event of the whole array whatever the order of arrival,
// and never seems older than it is. Credentials are sent only over TLS that was
// verified, pinned or explicitly left unverified, never to a redirect's target,
// and never appear in an error.
//
// Left out: deciding what idleness means (package idle), when to ask, and what
// to do about the answer. The package keeps no state but the session token; the
// memory of future-dated events is handed in and out as Seen.
package cml

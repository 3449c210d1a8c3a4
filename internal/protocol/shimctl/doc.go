// Package shimctl is the protocol between the host daemon and lull-shim: the
// messages, their framing, the daemon's client and the shim's server.
//
// The wire is a unix socket with one JSON object per line. Descriptors travel
// beside the first byte of a line (SCM_RIGHTS), and the line gives their
// number. A request has an ID and a verb, its answer has the same ID, and an
// event has no ID. The first request on a connection is hello.
//
// A peer with another user ID is refused (except root). Only one daemon is
// connected: the newest one replaces the older connection. Every line and every
// number of descriptors is bounded, a descriptor that is not taken is closed,
// and events reach the client in order.
//
// The verbs are implemented in package shim, and called by the process runtime.
package shimctl

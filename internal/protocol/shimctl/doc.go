// Package shimctl is the protocol between the host daemon and lull-shim: the
// messages, their framing, the daemon's client and the shim's server.
//
// The connection is a unix socket with one JSON object per line. Descriptors are
// sent with the first byte of a line (SCM_RIGHTS), and the line contains their
// number. A request has an ID and a verb, its answer has the same ID, and an
// event has no ID. The first request on a connection is hello.
//
// A peer with another user ID is refused (except root). Only one daemon is
// connected at a time: a new connection replaces the older one. The length of a
// line and the number of descriptors are bounded. A descriptor that nothing takes
// is closed. Events reach the client in order.
//
// Package shim implements the verbs; the process runtime calls them.
package shimctl

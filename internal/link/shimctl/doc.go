// Package shimctl is what the host daemon and lull-shim say to each other: the
// messages, their framing, the client that the daemon uses and the server that
// the shim runs.
//
// The wire is a unix socket with one JSON object on each line; descriptors
// travel beside the first byte of a line (SCM_RIGHTS) and the line says how
// many. A request has an id and a verb, its answer has the same id, and an
// event has no id. The first request on a connection is hello.
//
// It guarantees that a peer with another user id is refused (root excepted),
// that only one daemon is connected (the newest wins and the older connection
// is closed), that every line and every number of descriptors is bounded, that
// a descriptor which nobody takes is closed, and that events reach the client
// in order.
//
// It leaves out what the verbs do (package shim) and when to ask (the process
// runtime).
package shimctl

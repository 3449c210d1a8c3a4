// Package servertest runs an agent, a server with its API and controller, and
// their simulated cloud in one bubble, over in-memory connections. It tests who
// decides about a machine, who acts, and what the record says, in every
// combination of holder, source and fault.
package servertest

// Package servertest runs an agent, a server with its API and controller, and
// the simulated cloud they share in one bubble, over connections in memory:
// who decides about a machine, who acts, and what the record says of it, in
// every combination of holder, source and trouble.
package servertest

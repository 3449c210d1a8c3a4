// Package servertest tests an agent together with a server's API and controller and
// their simulated cloud, in one bubble, over in-memory connections. It checks which
// of them decides about a machine, which acts, and what is recorded, in every
// combination of holder, source and fault.
package servertest

// Package world is the state of the simulated cloud: accounts, regions, images,
// instances with EC2's life cycle, and the CML host that may run on each
// instance, with its labs, users, telemetry and license.
//
// It guarantees EC2's rules of life (which change of state is legal, what each
// one takes, what it is called in StateReason), idempotent launches, and an
// order of instances in which a page costs its own length and not the fleet's.
// Time-driven changes are computed on access: there is no goroutine, so a World
// works in a synctest bubble, and a hundred thousand instances cost nothing
// until they are accessed.
//
// It leaves out every wire format (packages ec2sim, cwsim, imdssim, cmlsim) and
// everything that a client could not observe: networks, disks, real guests.
//
// All methods are safe for concurrent use. Functions that take a visitor call
// it with the world locked: it must neither keep the pointer, nor change what
// it points to, nor wait, nor call back.
package world

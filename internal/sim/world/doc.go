// Package world is the state of the simulated cloud: accounts, regions, images,
// instances with EC2's life cycle, and the CML host that may run on each
// instance, with its labs, users, telemetry and license.
//
// It implements EC2's life cycle rules (which change of state is legal, how
// long each one takes, its name in StateReason), idempotent launches, and an
// order of instances in which a page costs its own length and not the fleet's.
// Time-driven changes are computed on access: there is no goroutine, so a World
// works in a synctest bubble, and a hundred thousand instances cost nothing
// until they are accessed.
//
// It contains no wire format (see packages ec2sim, cwsim, imdssim, cmlsim) and
// nothing that a client could not observe: no networks, disks or real guests.
//
// All methods are safe for concurrent use. Functions that take a visitor call
// it with the world locked. The visitor must not keep the pointer, change what
// it points to, block, or call back.
package world

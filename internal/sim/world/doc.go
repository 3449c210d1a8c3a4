// Package world is the state of the simulated cloud: accounts, regions, images, and
// instances with EC2's life cycle. An instance may run a CML host, with its labs,
// users, telemetry and license.
//
// It implements EC2's life cycle rules: which changes of state are legal, how long
// each takes, and the reason that EC2 gives for it. Launches are idempotent.
// Instances are ordered so that reading a page costs no more in a larger fleet.
// Changes over time are computed on access. There is no goroutine, so a World works
// in a synctest bubble, and instances that are not accessed cost nothing.
//
// It contains no wire format (see packages ec2sim, cwsim, imdssim, cmlsim) and
// nothing that a client could not observe: no networks, disks or real guests.
//
// All methods are safe for concurrent use. Functions that take a visitor call it with
// the world locked. The visitor must not keep the pointer, change what it points to,
// block, or call methods of World unless they are documented for visitors.
package world

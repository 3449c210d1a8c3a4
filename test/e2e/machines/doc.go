// Package machines tests the host with microVMs: the built daemon runs real
// guests under QEMU, and the tests use it as a user does.
//
// The tests cover three areas. The interaction matrix must hold inside a guest.
// nginx, Redis and a Python service must keep their data, their clients (wrk and
// redis-benchmark among them) and the time at every step of the ladder. A failure
// of QEMU, the daemon, the guest's memory, the disk or a saved guest must be
// reported with its reason, and must not lose anything that was acknowledged.
//
// LULL_VM_CYCLES sets the number of rounds at each step (default 2). The tests
// need qemu-system-x86_64, mke2fs and LULL_GUEST_KERNEL; make test provides them.
package machines

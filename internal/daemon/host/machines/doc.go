// Package machines proves the host on microVMs: the built daemon runs real
// guests under QEMU, and tests speak to it as a user does.
//
// Its tests hold the interaction matrix of seeds/004 inside a guest, that nginx,
// Redis and a Python service keep their data, their clients (wrk and
// redis-benchmark among them) and the time over every rung of the ladder, and that what breaks (QEMU, the daemon, the guest's
// memory, the disk, a saved guest) is told with its reason and loses nothing
// that was acknowledged.
//
// LULL_VM_CYCLES sets how many rounds each rung gets (default 2). They need
// qemu-system-x86_64, mke2fs and LULL_GUEST_KERNEL; make test brings them.
package machines

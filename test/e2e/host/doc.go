// Package host tests the host daemon with real processes: it runs the real lull
// and lull-shim as child processes, with its own programs, real sockets and real
// signals, and then checks the machine.
//
// The tests use loopback and one other address of this machine, and end every
// process that they started. A random test prints its seed and a report line. The
// tests check no times except limits of tens of seconds.
//
// Environment: LULL_BIN_DIR names a directory with lull and lull-shim to use
// instead of fresh builds. LULL_RACE=1 builds the daemon with the race detector.
// LULL_SEED repeats a run. LULL_HOST_RACES (connections of each race test on each
// path), LULL_HOST_CRASHES (rounds) and LULL_HOST_CYCLES (pauses and wakes of the
// leak test) set the counts.
package host

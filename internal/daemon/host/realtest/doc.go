// Package realtest proves the host daemon on real processes: it runs the real
// lull and lull-shim as child processes, with programs of its own, real
// sockets and real signals, and looks at the world afterwards.
//
// It has no code besides its tests. What they promise: they use loopback and
// one further address of this machine only, end every process that they
// started, print the seed and a report line of each random test, and assert
// nothing by time other than limits of tens of seconds.
//
// Environment: LULL_BIN_DIR names a directory with lull and lull-shim that are
// used instead of fresh ones; LULL_RACE=1 builds the daemon with the race
// detector; LULL_SEED repeats a run; LULL_HOST_RACES (connections of each race
// test on each path), LULL_HOST_CRASHES (rounds) and LULL_HOST_CYCLES (pauses
// and wakes of the leak test) raise the counts.
package realtest

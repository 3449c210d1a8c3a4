// Package programs tests the host with common programs: Redis, PostgreSQL and
// nginx from Debian, each put to sleep and woken many times while their own
// clients come and go.
//
// The tests use the built daemon from outside, as a user does, on the direct path
// and on the relay, as root and as an ordinary user. They check that no client
// sees an error, that no acknowledged write is lost, that a program is paused
// once its clients are gone, and that idle connections keep it running only if
// the instance's policy says so.
//
// LULL_PROGRAM_CYCLES sets the number of pauses and wakes of each program
// (default 50). The test of a program that is not installed is skipped and says
// so.
package programs

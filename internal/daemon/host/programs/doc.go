// Package programs proves the host on programs that people run: Redis,
// PostgreSQL and nginx from Debian, each put to sleep and woken many times
// while the clients that belong to them come and go.
//
// Its tests drive the built daemon from outside, as a user does, on the direct
// path and on the relay, as root and as an ordinary user. They hold that no
// client sees an error, that no acknowledged write is lost, that a program is
// paused when its clients are gone, and that idle connections hold or do not
// as the instance's policy says.
//
// LULL_PROGRAM_CYCLES sets how many pauses and wakes each program goes through
// (default 50). A program that is not installed skips its test by name.
package programs

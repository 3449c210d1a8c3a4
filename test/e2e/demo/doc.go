// Package demo tests lull demo as a new user runs it: on this machine with what
// is installed here, and in a root directory with one file, as root and as an
// ordinary user. However the demo ends, it must leave no process, file, socket or
// control group.
package demo

// Package demo tests lull demo as a newcomer runs it: on this machine with what
// is installed here, and in a directory that holds one file, as root and as an
// ordinary user. However it ends, it must leave no process, file, socket or
// control group.
package demo

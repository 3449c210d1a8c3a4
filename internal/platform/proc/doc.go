// Package proc reads the kernel's account of processes and of the machine from
// a proc file system: what belongs to a process tree, how much CPU it has used,
// whether all its tasks are stopped, which sockets it holds, and (files
// machine_*.go) what the machine as a whole does.
//
// It guarantees that reading and parsing are separate (each parser takes bytes
// and is fuzzed), that a process that has ended is distinguished from one that
// may not be inspected (ErrGone versus EACCES and EPERM), and that a line it
// cannot parse is an error and never a zero. Reads of one process allocate
// nothing but their result.
//
// It does not judge: a number here is the kernel's value at that moment.
// Control groups (package cgroup) know a tree better than parent pids do and
// should be preferred if they exist.
//
// All methods of FS are safe for concurrent use; a File is not.
package proc

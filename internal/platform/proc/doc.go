// Package proc reads the kernel's account of processes and of the machine from
// a proc file system: what a process tree is, what CPU it has used, whether
// every task of it is stopped, which sockets it holds, and (files machine_*.go)
// what the machine as a whole does.
//
// It guarantees that reading and parsing are apart (each parser takes bytes and
// is fuzzed), that a process which has ended is told apart from one that may
// not be looked at (ErrGone against EACCES and EPERM), and that a line it
// cannot understand is an error and never a zero. Reads of one process allocate
// nothing but their result.
//
// It does not judge: a number here is the kernel's value at that moment. It
// also leaves out cgroups (package cgroup), which know a tree better than
// parent pids do and should be preferred where they exist.
//
// All methods of FS are safe for concurrent use; a File is not.
package proc

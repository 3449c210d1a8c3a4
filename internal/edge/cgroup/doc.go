// Package cgroup makes the control groups of instances and uses them: freeze,
// thaw, kill, list, measure, reclaim. Where no group can be made it stops and
// continues a process tree by signals instead (Stop, Continue).
//
// It guarantees that Freeze and Stop return nil only once every task is still
// (cgroup.events says frozen 1, freezer.state reads FROZEN, or every thread is
// in state T), that on any error everything runs again, and that a process
// which is being forked at that moment does not escape. Kill returns nil only
// when no process is left. Thaw is one write and may be repeated.
//
// It knows the unified hierarchy (also beside v1 controllers, and below a
// directory that was delegated to an ordinary user) and the v1 freezer. It
// leaves out limits and weights: nothing here makes a program slower.
//
// To look at it from outside: the groups are LULL/HOST/ID below the directory
// that Find names; cgroup.procs, cgroup.freeze and freezer.state can be read
// and written by hand while a daemon runs.
package cgroup

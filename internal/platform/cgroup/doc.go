// Package cgroup creates and controls the control groups of instances: freeze,
// thaw, kill, list, measure, reclaim. Where no group can be created it stops and
// continues a process tree by signals instead (Stop, Continue).
//
// Freeze and Stop return nil only once every task has stopped (cgroup.events
// shows frozen 1, freezer.state reads FROZEN, or every thread is in state T). On
// any error everything runs again, and a process being forked at that moment does
// not escape. Kill returns nil only when no process is left. Thaw is one write
// and may be repeated.
//
// The package supports the unified hierarchy (also beside v1 controllers, and
// below a directory delegated to an unprivileged user) and the v1 freezer. It
// sets no limits or weights.
//
// For debugging: groups are named LULL/HOST/ID below the directory that Find
// returns. cgroup.procs, cgroup.freeze and freezer.state can be read and written
// manually while a daemon runs.
package cgroup

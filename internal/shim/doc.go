// Package shim is lull-shim, the one small process of a host that keeps the
// instances' programs while the daemon restarts. It starts them, collects their
// exits, writes their logs, holds their LISTEN_FDS sockets, and thaws them when
// no daemon has been connected for a moment.
//
// Guarantees: a program never runs before its run is on disk (DIR/runs). An exit
// code is on disk (DIR/exits) before it is reported and stays there until the
// daemon acknowledges it. A program can always write its output: it goes to a pipe
// that the shim holds open in both directions, so that a missing reader causes no
// SIGPIPE. Log files are bounded. A second shim refuses to start on the same
// directory. One goroutine reads all pipes and one writes all files; there is none
// per instance.
//
// A child of the shim, the watchdog, holds duplicates of its sockets. If the shim
// is killed and no daemon starts another one, the watchdog starts one after a
// second.
//
// The shim exits on SIGTERM after thawing everything, and by itself after it
// has had nothing to keep and no daemon for a while. The programs continue
// either way. A later shim on the same directory takes over their logs and the
// duty to thaw them, but not their exit codes, because they are not its
// children (Exit.Lost). Until then a program that writes more than the pipe
// holds (64 KiB) blocks.
//
// The shim decides nothing: not what runs, what is frozen, or what is
// restarted. Package shimctl defines the protocol.
package shim

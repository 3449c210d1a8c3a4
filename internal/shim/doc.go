// Package shim is lull-shim: the one small process of a host that keeps the
// instances' programs while the daemon comes and goes. It starts them, collects
// how they end, writes their logs, holds their LISTEN_FDS sockets, and thaws
// them when no daemon has been there for a moment.
//
// It guarantees that a program never runs before its run is on disk (DIR/runs),
// that an exit code is on disk (DIR/exits) before it is reported and stays there
// until the daemon acknowledges it, that a program's output can fail no write of
// the program (a pipe that it holds open in both directions itself, so no reader
// means no SIGPIPE), that log files are bounded, and that a second shim on the
// same directory refuses. One goroutine reads all pipes and one writes all
// files; there is none per instance.
//
// A child of it, the watchdog, holds duplicates of its sockets. If the shim is
// killed and no daemon starts another one, the watchdog does, after a second.
//
// It ends on SIGTERM after thawing everything, and by itself when it has had
// nothing to keep and no daemon for a while. The programs run on either way. A
// later shim on the same directory takes them up again: logs and thaw duty, but
// not how they end, because they are not its children (Exit.Lost). Until then a
// program that writes more than the pipe holds (64 KiB) waits.
//
// It leaves out every decision: what runs, what is frozen, what is started
// again. The protocol is package shimctl.
package shim

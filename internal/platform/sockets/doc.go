// Package sockets observes other programs' sockets. It duplicates them
// (pidfd_getfd), reads their state (Inspect), and waits on duplicates for the
// first sign of a client (one epoll for a whole host). What no descriptor shows,
// such as connections that have ended, it lists with sock_diag. The kernel walks
// all connections of the machine for such a list, whatever was asked for.
//
// It guarantees that a duplicate is closed when its Guard is closed or could
// not be created, that a connection that waited in a backlog before its guard
// was registered still fires the guard, and that an event of a closed guard
// never reaches another one although file descriptor numbers are reused.
//
// It never changes a socket that it observes: a duplicate shares its file
// status flags with the program (so O_NONBLOCK is not touched), and SO_ERROR is
// not read, because reading clears it. Nothing is accepted, read or written.
//
// The caller decides when a duplicate may exist, and must close every guard
// before it lets the program run. (Those of listeners may follow, see Guard.Close.) To read the socket of a running program, it
// makes one duplicate at a time and closes it at once. One held for longer
// swallows the FIN of a connection that the program closes, keeps the backlog
// of an ended program accepting, and makes a restart fail with EADDRINUSE.
package sockets

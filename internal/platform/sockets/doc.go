// Package sockets observes other programs' sockets. It duplicates them
// (pidfd_getfd), reads their state (Inspect), and waits on duplicates for the
// first sign of a client, with one epoll instance for a whole host. What no
// descriptor shows, such as connections that have ended, it lists with sock_diag.
// For such a list the kernel walks all connections of the machine, whatever the
// filter.
//
// It guarantees that a duplicate is closed when its Guard is closed or could not
// be created, that a connection that already waits in a backlog when its guard is
// registered still fires the guard, and that an event of a closed guard never
// reaches another guard although descriptor numbers are reused.
//
// It never changes a socket that it observes. A duplicate shares its file status
// flags with the program, so O_NONBLOCK is not changed. Reading SO_ERROR clears
// it, so it is not read. Nothing is accepted, read or written.
//
// The caller decides when a duplicate may exist, and must close every guard
// before it lets the program run (except listeners, see Guard.Close). To read a
// socket of a running program, make one duplicate at a time and close it at once.
// A duplicate that is held longer delays the FIN of a connection that the program
// closes, keeps the backlog of an ended program accepting, and makes a restart
// fail with EADDRINUSE.
package sockets

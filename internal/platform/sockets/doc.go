// Package sockets looks at other programs' sockets: it takes duplicates of them
// (pidfd_getfd), waits on duplicates for the first sign of a client (one epoll
// for a whole host), and lists what the kernel knows of connections (sock_diag).
//
// It guarantees that a duplicate is closed when its Guard is closed or could not
// be made, that a connection which waited in a backlog before its guard was
// registered fires the guard all the same, and that an event of a closed guard
// never reaches another one although file descriptor numbers are reused.
//
// It never changes a socket it looks at: a duplicate shares its file status flags
// with the program (so O_NONBLOCK is not touched), and SO_ERROR is not read,
// because reading clears it. Nothing is accepted, read or written.
//
// It leaves out when a duplicate may exist. Held over a thaw it swallows the FIN
// of a connection that the program closes, keeps the backlog of an ended program
// accepting, and makes a restart fail with EADDRINUSE: the caller closes every
// guard before it lets the program run.
package sockets

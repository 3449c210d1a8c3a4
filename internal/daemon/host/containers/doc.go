// Package containers proves the host on containers: the built daemon runs them
// by the real runc, or idles those of a real dockerd, and tests speak to it as a
// user does.
//
// Its tests hold what an image says, where it may come from and what a hostile
// one does; limits, workspaces, signals and the layer that is kept; how far a
// container is apart from the machine; and that a container of Docker is never
// left paused, whoever goes away, comes back or is used meanwhile. What every
// runtime does alike is in package realtest.
//
// They need root, runc, docker.io and busybox-static.
package containers

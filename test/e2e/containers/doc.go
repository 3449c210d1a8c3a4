// Package containers tests the host with containers. The built daemon runs them
// with the real runc, or manages those of a real dockerd, and the tests use it as
// a user does.
//
// The tests cover image configuration, image sources and hostile images; limits,
// workspaces, signals and the persistent layer; the isolation of a container from
// the machine; and that a Docker container is never left paused, whichever
// process ends, starts or intervenes. The behavior that all runtimes share is
// tested in test/e2e/host.
//
// The tests need root, runc, docker.io and busybox-static.
package containers

// Package units tests the adoption of systemd units with a systemd that really
// boots: in its own namespaces, with its own root directory in memory, its own
// tree of control groups, and the programs of this machine. The adopted programs
// are nginx, Redis and PostgreSQL with the units of their packages.
package units

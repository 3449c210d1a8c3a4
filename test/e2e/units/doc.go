// Package units tests the adoption of systemd units against a systemd that really
// boots: in namespaces of its own, with its own root directory in memory, its own
// tree of control groups, and the programs of this machine. The programs adopted
// there are nginx, Redis and PostgreSQL with the units of their packages.
package units

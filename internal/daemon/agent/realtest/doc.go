// Package realtest tries the whole agent, as the program lull, on a real
// machine: real CPU load, disk writes, network interfaces, sshd, tmux and
// shells, and the AWS SDK against the simulated cloud.
//
// Each test has a machine of its own made of kernel namespaces (mounts,
// network, processes), so that other people's terminals and traffic do not
// show in it. CPU and disks cannot be divided that way: for them the threshold
// is laid above what the machine does anyway, and where it does too much to
// tell the two apart the test says so and is skipped.
//
// It needs root, and Debian's openssh-server, tmux, iproute2 and util-linux.
// It holds no code that others import.
package realtest

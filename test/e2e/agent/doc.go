// Package agent tests the complete agent, as the program lull-agent, on a real
// machine: real CPU load, disk writes, network interfaces, sshd, tmux and
// shells, and the AWS SDK against the simulated cloud.
//
// Each test has its own machine made of kernel namespaces (mounts, network,
// processes), so that other terminals and traffic do not affect it. CPU and
// disks cannot be isolated that way: their thresholds are set above the
// machine's other load, and if that load is too high the test is skipped with
// this reason.
//
// The tests need root, and Debian's openssh-server, tmux, iproute2 and
// util-linux. The package contains no code for import.
package agent

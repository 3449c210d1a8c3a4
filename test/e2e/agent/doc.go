// Package agent tests the complete agent, as the program lull-agent, on a real
// machine: real CPU load, disk writes, network interfaces, sshd, tmux and shells,
// and the AWS SDK against the simulated cloud.
//
// Each test has its own machine made of kernel namespaces (mounts, network,
// processes), so that other terminals and traffic do not affect it. CPU and disks
// cannot be isolated in this way. Their thresholds are set above the load of the
// rest of the machine, and if that load is too high the test is skipped and says
// so.
//
// The tests need root, and Debian's openssh-server, tmux, iproute2 and
// util-linux.
package agent

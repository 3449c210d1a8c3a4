// Package corpus contains labeled days of activity of host instances, machines
// and CML workers. Its tests replay them through lull with its default settings
// and through the published rules of other tools.
//
// A script defines a day: who does what, and when. The label follows from the
// script alone: it says when a user or a program used the object. What a machine
// sees of the day (CPU time, bytes, connections, terminals, logins) comes from
// recordings of real programs (testdata, made by bench/corpus). They are played
// while the script's users are at work and while they are away.
//
// Lull reads the days through its real readers. An instance is sampled by the
// process runtime from control group and proc files; only the kernel's socket
// list is replaced. A machine is read by the agent's readers from a tree of proc,
// dev, run and var files. A worker is read by the controller's CML, EC2 and
// CloudWatch clients, over HTTP.
package corpus

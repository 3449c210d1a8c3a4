// Package corpus holds labeled days of activity, of host instances, machines and
// CML workers, and replays them through lull as it ships and through the
// published rules of other tools. Its tests are all it has.
//
// A day is written by a script: who does what, and when. The label follows from
// the script alone and says when a user or a program used it. What the day
// looks like to a machine (CPU time, bytes, connections, terminals, logins) is
// made of recordings of real programs (testdata, made by bench/corpus) that are
// played while the script's users are at work and while they are away.
//
// Lull reads the days below its engine: an instance through the process
// runtime's own sampling of control group, proc and socket list, of which only
// the kernel's socket list is replaced; a machine through the agent's readers
// over a tree of proc, dev, run and var; a worker through the controller's CML,
// EC2 and CloudWatch clients, over HTTP.
package corpus

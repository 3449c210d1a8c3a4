// Package foreign runs lull server against an EC2 and a CloudWatch that this
// project did not write. The emulator is a module of its own, in testdata/emulator.
package foreign

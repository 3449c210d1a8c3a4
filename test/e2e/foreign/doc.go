// Package foreign runs lull server against an emulator of EC2 and CloudWatch from
// another project. The emulator is a separate module, in testdata/emulator.
package foreign

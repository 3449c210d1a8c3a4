// Package simtest tests the simulator with unmodified clients: the AWS SDK for
// Go and awscli. It contains tests only, so that no other package's tests link
// an SDK.
package simtest

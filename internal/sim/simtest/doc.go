// Package simtest proves the simulator by the clients that it must deceive: the
// unmodified AWS SDK for Go and awscli. It holds tests only, so that no other
// package's tests link an SDK.
package simtest

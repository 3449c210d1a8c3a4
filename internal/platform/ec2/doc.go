// Package ec2 reads and controls EC2 instances through the AWS SDK.
//
// A Client is for one account in one region; a Set creates and keeps one for
// each. States reads the state of a whole region in pages, once per cycle of the
// controller; everything else is requested by id or by filter.
//
// Guarantees. A result is complete or an error, never part of a region. An
// instance that EC2 does not know is reported as missing, by id, never as stopped
// or terminated, and does not affect the result for the others. Each attempt of a
// call, including the SDK's retries, takes a token from the rate limit of the
// account and region and ends with the caller's context. A launch is idempotent
// by its client token. Errors are *Error values of a closed set of kinds.
//
// The controller decides whether a missing instance is gone, whether a stop is
// allowed, and how to react to a throttled call. A request is not fenced: the
// deadline of its context must be earlier than the time at which the caller loses
// its right to act.
package ec2

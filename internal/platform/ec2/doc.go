// Package ec2 reads and moves EC2 instances through the AWS SDK.
//
// A Client speaks for one account in one region; a Set makes and keeps one for
// each. States reads the state of a whole region in pages, which is what a cycle
// of the controller costs; everything else is asked for by id or by filter.
//
// Guarantees. An answer is complete or an error, never a part of a region. An
// instance that EC2 does not know is reported by its id as missing, never as
// stopped or terminated, and does not spoil the answer about the others. Each
// attempt of a call, the SDK's retries included, takes a token of the account and
// region's rate limit and ends with the caller's context. A launch is idempotent
// by its client token. Errors are *Error values of a closed set of kinds.
//
// Left out: deciding anything. Whether a missing instance is believed to be gone,
// whether a stop is allowed, and what to do about a throttled call is for the
// controller to say. Requests are not fenced: the caller's context deadline must
// lie before the end of its own right to act.
package ec2

package ec2

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"

	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/smithy-go"
)

// Kind is the kind of failure of an Error.
type Kind string

// The kinds of failure.
const (
	Throttled            Kind = "throttled"             // too many calls; retry later
	NotFound             Kind = "not_found"             // EC2 does not know the instance
	Unauthorized         Kind = "unauthorized"          // credentials or permissions
	Capacity             Kind = "capacity"              // no capacity, or a quota reached
	HibernateUnsupported Kind = "hibernate_unsupported" // the instance cannot hibernate (now)
	IncorrectState       Kind = "incorrect_state"       // the instance's state does not allow it
	Protected            Kind = "protected"             // stop or termination protection
	Mismatch             Kind = "mismatch"              // client token used with other parameters
	Unreachable          Kind = "unreachable"           // no usable answer; the call may have taken effect
	Canceled             Kind = "canceled"              // the caller's context ended; the call may have taken effect
	Invalid              Kind = "invalid"               // EC2 rejected the request itself
)

// Error is a failed call, for errors.As.
type Error struct {
	Op      string // the API's name of the call
	Region  string
	Kind    Kind
	Code    string // EC2's error code, empty without an answer
	Message string // EC2's message
	IDs     []string
	Err     error
}

func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "cannot call EC2 %s in %s", e.Op, e.Region)
	if len(e.IDs) > 0 {
		fmt.Fprintf(&b, " for %s", strings.Join(e.IDs[:min(3, len(e.IDs))], ", "))
		if more := len(e.IDs) - 3; more > 0 {
			fmt.Fprintf(&b, " and %d more", more)
		}
	}
	fmt.Fprintf(&b, ": %s", e.Kind)
	if e.Code != "" {
		fmt.Fprintf(&b, " (%s: %s)", e.Code, e.Message)
	} else if e.Err != nil {
		fmt.Fprintf(&b, ": %v", e.Err)
	}
	return b.String()
}

func (e *Error) Unwrap() error { return e.Err }

// KindOf returns the kind of the *Error in err's tree, or "".
func KindOf(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return ""
}

// failed returns err as an *Error of the call op for ids.
func (c *Client) failed(op string, err error, ids ...string) error {
	e := &Error{Op: op, Region: c.region, IDs: ids, Err: err}
	var api smithy.APIError
	if errors.As(err, &api) {
		e.Code, e.Message = api.ErrorCode(), api.ErrorMessage()
	}
	e.Kind = classify(err, e.Code, e.Message)
	return e
}

var kinds = map[string]Kind{
	"RequestLimitExceeded": Throttled, "Throttling": Throttled, "ThrottlingException": Throttled,
	"ThrottledException": Throttled, "RequestThrottled": Throttled, "RequestThrottledException": Throttled,
	"TooManyRequestsException": Throttled, "EC2ThrottledException": Throttled, "SlowDown": Throttled,
	"PriorRequestNotComplete": Throttled, "BandwidthLimitExceeded": Throttled,

	"InvalidInstanceID.NotFound": NotFound,

	"UnauthorizedOperation": Unauthorized, "AuthFailure": Unauthorized, "AccessDenied": Unauthorized,
	"AccessDeniedException": Unauthorized, "InvalidClientTokenId": Unauthorized, "SignatureDoesNotMatch": Unauthorized,
	"UnrecognizedClientException": Unauthorized, "ExpiredToken": Unauthorized, "ExpiredTokenException": Unauthorized,
	"RequestExpired": Unauthorized, "OptInRequired": Unauthorized, "Blocked": Unauthorized,
	"PendingVerification": Unauthorized, "MissingAuthenticationToken": Unauthorized, "InvalidAccessKeyId": Unauthorized,

	"InsufficientInstanceCapacity": Capacity, "InsufficientHostCapacity": Capacity, "InsufficientCapacity": Capacity,
	"InsufficientReservedInstanceCapacity": Capacity, "InsufficientAddressCapacity": Capacity,
	"InsufficientFreeAddressesInSubnet": Capacity, "InsufficientVolumeCapacity": Capacity,
	"InstanceLimitExceeded": Capacity, "VcpuLimitExceeded": Capacity, "VolumeLimitExceeded": Capacity,
	"MaxSpotInstanceCountExceeded": Capacity, "SpotMaxPriceTooLow": Capacity,

	"UnsupportedHibernationConfiguration": HibernateUnsupported,

	"IncorrectInstanceState": IncorrectState, "IncorrectState": IncorrectState,

	"OperationNotPermitted": Protected,

	"IdempotentParameterMismatch": Mismatch, "IdempotentInstanceTerminated": Mismatch,

	"InternalError": Unreachable, "InternalFailure": Unreachable, "Unavailable": Unreachable,
	"ServiceUnavailable": Unreachable, "RequestTimeout": Unreachable,
}

// hibernateHints are error codes that EC2 uses for hibernation and for other
// faults. They count as HibernateUnsupported only if the message mentions
// hibernation.
var hibernateHints = []string{"UnsupportedOperation", "InvalidParameterCombination", "InvalidParameterValue", "Unsupported", "IncorrectInstanceState"}

func classify(err error, code, message string) Kind {
	if slices.Contains(hibernateHints, code) && strings.Contains(strings.ToLower(message), "hibernat") {
		return HibernateUnsupported
	}
	if k, ok := kinds[code]; ok {
		return k
	}
	var held *limitError
	var resp *awshttp.ResponseError
	var network net.Error
	switch {
	case errors.As(err, &held) && !errors.Is(err, context.Canceled):
		return Throttled
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return Canceled
	case errors.As(err, &resp) && resp.HTTPStatusCode() == http.StatusTooManyRequests:
		return Throttled
	case errors.As(err, &resp) && resp.HTTPStatusCode() >= 500:
		return Unreachable
	case errors.As(err, &network):
		return Unreachable
	case isCredentials(err):
		return Unauthorized
	case code != "":
		return Invalid
	}
	return Unreachable
}

// isCredentials reports whether no credentials were found. The SDK has no type for it.
func isCredentials(err error) bool {
	text := err.Error()
	return strings.Contains(text, "get credentials") || strings.Contains(text, "failed to refresh cached credentials") ||
		strings.Contains(text, "get identity")
}

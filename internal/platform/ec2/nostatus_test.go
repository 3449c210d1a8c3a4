package ec2

import (
	"maps"
	"net/url"
	"testing"
)

// TestStatesWithoutStatus checks that States falls back to DescribeInstances on a
// cloud without DescribeInstanceStatus, and does not try the latter again. Where
// the operation exists and fails, its error is returned.
func TestStatesWithoutStatus(t *testing.T) {
	described := func(url.Values) reply {
		return fine("DescribeInstances", reservations(instanceXML(id(1), "running", ""), instanceXML(id(2), "stopped", "")))
	}
	for name, tc := range map[string]struct {
		status func(url.Values) reply
		want   bool
	}{
		"unknown action":  {nil, true},
		"another answer":  {func(url.Values) reply { return reply{status: 400, body: `{"__type":"InvalidAction"}`} }, true},
		"no permission":   {func(url.Values) reply { return refusal("UnauthorizedOperation", "no") }, false},
		"throttled":       {func(url.Values) reply { return refusal("RequestLimitExceeded", "later") }, false},
		"no answer":       {func(url.Values) reply { return reply{drop: true} }, false},
		"an error of its": {func(url.Values) reply { return refusal("InternalError", "oh") }, false},
	} {
		t.Run(name, func(t *testing.T) {
			actions := map[string]func(url.Values) reply{"DescribeInstances": described}
			if tc.status != nil {
				actions["DescribeInstanceStatus"] = tc.status
			}
			f := newFake(t, actions)
			c := f.client(t, testLimits)
			for range 2 {
				states, err := c.States(t.Context())
				if !tc.want {
					if err == nil || states != nil || len(f.asked("DescribeInstances")) > 0 {
						t.Fatalf("%v, %v", states, err)
					}
					continue
				}
				if err != nil || !maps.Equal(states, map[string]State{id(1): Running, id(2): Stopped}) {
					t.Fatalf("%v, %v", states, err)
				}
			}
			if n := len(f.asked("DescribeInstanceStatus")); tc.want && n != 1 {
				t.Errorf("statuses were asked for %d times", n)
			}
		})
	}
	f := newFake(t, nil)
	if states, err := f.client(t, testLimits).States(t.Context()); err == nil || states != nil {
		t.Errorf("an EC2 that has neither: %v, %v", states, err)
	}
}

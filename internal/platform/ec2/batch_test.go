package ec2

import (
	"net/url"
	"strconv"
	"sync"
	"testing"
)

// idsOf returns the instance ids in the parameters of a call.
func idsOf(v url.Values) (out []string) {
	for n := 1; v.Get("InstanceId."+strconv.Itoa(n)) != ""; n++ {
		out = append(out, v.Get("InstanceId."+strconv.Itoa(n)))
	}
	return out
}

// TestJoinedCalls checks that stopping, terminating or tagging 250 instances at
// the same time takes few calls, and that only a protected instance among them is
// refused.
func TestJoinedCalls(t *testing.T) {
	const n, guarded = 250, 77
	changed := func(state string) func(url.Values) reply {
		return func(v url.Values) reply {
			var all []string
			for _, i := range idsOf(v) {
				if i == id(guarded) {
					return refusal("OperationNotPermitted", "protected")
				}
				all = append(all, "<instanceId>"+i+"</instanceId><currentState><name>"+state+"</name></currentState>")
			}
			return fine(v.Get("Action"), "<instancesSet>"+items(all...)+"</instancesSet>")
		}
	}
	f := newFake(t, actions{
		"StopInstances": changed("stopping"), "TerminateInstances": changed("shutting-down"),
		"CreateTags": func(url.Values) reply { return fine("CreateTags", "<return>true</return>") },
	})
	for name, call := range map[string]func(c *Client, id string) error{
		"stop":      func(c *Client, id string) error { _, err := c.Stop(t.Context(), id, false); return err },
		"terminate": func(c *Client, id string) error { _, err := c.Terminate(t.Context(), id); return err },
		"tag": func(c *Client, id string) error {
			return c.CreateTags(t.Context(), []string{id}, map[string]string{"a": "b", "c": "d"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := f.client(t, testLimits)
			before := len(f.calls)
			errs := make([]error, n)
			var wg sync.WaitGroup
			for i := range n {
				wg.Go(func() { errs[i] = call(c, id(i)) })
			}
			wg.Wait()
			if calls := len(f.calls) - before; calls > n/4 {
				t.Errorf("%d calls for %d instances", calls, n)
			}
			for i, err := range errs {
				want := Kind("")
				if i == guarded && name != "tag" {
					want = Protected
				}
				if got := KindOf(err); got != want || want == "" && err != nil {
					t.Errorf("instance %d: %v, want %q", i, err, want)
				}
			}
		})
	}
}

// TestPreflightsAreJoined checks that the Elastic IPs of 250 instances are read
// with few calls if the descriptions do not contain the kind of the public
// address. Only instances with an Elastic IP keep their address. After a refusal
// it is unknown for all instances.
func TestPreflightsAreJoined(t *testing.T) {
	const n = 250
	refused := false
	f := newFake(t, actions{
		"DescribeInstances": func(v url.Values) reply {
			var all []string
			for _, i := range idsOf(v) {
				all = append(all, instanceXML(i, "running", "<instanceType>t3.large</instanceType><ipAddress>198.51.100.7</ipAddress>"))
			}
			return fine("DescribeInstances", reservations(all...))
		},
		"DescribeInstanceTypes": func(url.Values) reply {
			return fine("DescribeInstanceTypes", "<instanceTypeSet>"+items("<instanceType>t3.large</instanceType><instanceStorageSupported>false</instanceStorageSupported>")+"</instanceTypeSet>")
		},
		"DescribeInstanceAttribute": func(url.Values) reply {
			return fine("DescribeInstanceAttribute", "<disableApiStop><value>false</value></disableApiStop>")
		},
		"DescribeAddresses": func(v url.Values) reply {
			if refused {
				return refusal("UnauthorizedOperation", "no")
			}
			var all []string
			for i := 1; v.Get("Filter.1.Value."+strconv.Itoa(i)) != ""; i++ {
				if at := v.Get("Filter.1.Value." + strconv.Itoa(i)); at != id(7) {
					all = append(all, "<publicIp>198.51.100.7</publicIp><instanceId>"+at+"</instanceId>")
				}
			}
			return fine("DescribeAddresses", "<addressesSet>"+items(all...)+"</addressesSet>")
		},
	})
	c := f.client(t, testLimits)
	for _, refused = range []bool{false, true} {
		before := len(f.asked("DescribeAddresses"))
		got := make([]Check, n)
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				p, err := c.Preflight(t.Context(), id(i))
				if got[i] = p.ChangesAddress; err != nil {
					t.Errorf("instance %d: %v", i, err)
				}
			})
		}
		wg.Wait()
		if calls := len(f.asked("DescribeAddresses")) - before; calls > n/10 {
			t.Errorf("refused %t: %d calls for %d instances", refused, calls, n)
		}
		for i, g := range got {
			if refused && KindOf(g.Err) != Unauthorized || !refused && (g.Err != nil || g.Set != (i == 7)) {
				t.Errorf("refused %t, instance %d: %+v", refused, i, g)
			}
		}
	}
}

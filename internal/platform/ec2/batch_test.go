package ec2

import (
	"net/url"
	"strconv"
	"sync"
	"testing"
)

// ids of an instance call.
func idsOf(v url.Values) (out []string) {
	for n := 1; v.Get("InstanceId."+strconv.Itoa(n)) != ""; n++ {
		out = append(out, v.Get("InstanceId."+strconv.Itoa(n)))
	}
	return out
}

// TestJoinedCalls: 250 instances that are stopped, terminated or tagged one by
// one at the same time take few calls, though one of them is protected, which is
// refused for it alone.
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

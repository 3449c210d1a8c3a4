package ec2

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/lib/errtest"
)

type actions = map[string]func(url.Values) reply

func TestWorkerStatus(t *testing.T) {
	for state, want := range map[State]string{
		"pending": "PROVISIONING", "running": "RUNNING", "stopping": "STOPPING", "stopped": "STOPPED",
		"shutting-down": "TERMINATING", "terminated": "TERMINATED", "rebooting": "UNKNOWN", "": "UNKNOWN",
	} {
		if got := state.WorkerStatus(); got != want {
			t.Errorf("%q is %s, want %s", state, got, want)
		}
	}
}

func statusPage(from, to int, state, token string) reply {
	var parts []string
	for n := from; n < to; n++ {
		parts = append(parts, instanceXML(id(n), state, ""))
	}
	if token != "" {
		token = "<nextToken>" + token + "</nextToken>"
	}
	return fine("DescribeInstanceStatus", "<instanceStatusSet>"+items(parts...)+"</instanceStatusSet>"+token)
}

func TestStates(t *testing.T) {
	last := statusPage(20, 25, "stopped", "")
	f := newFake(t, actions{"DescribeInstanceStatus": func(v url.Values) reply {
		if v.Get("IncludeAllInstances") != "true" || v.Get("MaxResults") != "1000" {
			return refusal("InvalidParameterValue", "not the whole region")
		}
		switch v.Get("NextToken") {
		case "":
			return statusPage(0, 10, "running", "p2")
		case "p2":
			return statusPage(10, 20, "pending", "p3")
		}
		return last
	}})
	c := f.client(t, testLimits)
	states, err := c.States(t.Context())
	if err != nil || len(states) != 25 || states[id(3)] != Running || states[id(13)] != Pending || states[id(24)] != Stopped {
		t.Fatalf("%d states, %v", len(states), err)
	}
	if n := len(f.asked("DescribeInstanceStatus")); n != 3 {
		t.Errorf("%d calls for 3 pages", n)
	}
	for _, last = range []reply{
		refusal("UnauthorizedOperation", "no"),
		statusPage(20, 25, "stopped", "p3"), // a token of which the server knows nothing
		fine("DescribeInstanceStatus", "<instanceStatusSet><item><instanceId>i-1</instanceId></item></instanceStatusSet>"),
	} {
		if states, err := c.States(t.Context()); err == nil || states != nil {
			t.Errorf("a region half read: %d states, %v", len(states), err)
		}
	}
}

// knowing answers DescribeInstances as EC2 does for ids it knows. name returns
// the unknown ids that EC2's error message names.
func knowing(known map[string]bool, name func(unknown []string) []string) actions {
	return actions{"DescribeInstances": func(v url.Values) reply {
		var found, unknown []string
		for _, one := range list(v, "InstanceId") {
			if known[one] {
				found = append(found, instanceXML(one, "running", ""))
			} else {
				unknown = append(unknown, one)
			}
		}
		if len(unknown) > 0 && name != nil {
			return refusal("InvalidInstanceID.NotFound", fmt.Sprintf("The instance IDs '%s' do not exist", strings.Join(name(unknown), ", ")))
		}
		return fine("DescribeInstances", reservations(found...))
	}}
}

func TestInstancesMissing(t *testing.T) {
	const n = 450
	known := map[string]bool{}
	var ids, gone []string
	for i := range n {
		ids = append(ids, id(i))
		if known[id(i)] = i%90 != 7; !known[id(i)] {
			gone = append(gone, id(i))
		}
	}
	for _, c := range []struct {
		name string
		say  func([]string) []string
		most int // calls
	}{
		{"names all", func(u []string) []string { return u }, 6},
		{"names one", func(u []string) []string { return u[:1] }, 8},
		{"names none", func(u []string) []string { return nil }, 120},
		{"names others", func(u []string) []string { return []string{id(99999)} }, 120},
		{"leaves them out", nil, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFake(t, knowing(known, c.say))
			found, missing, err := f.client(t, testLimits).Instances(t.Context(), append(slices.Clone(ids), ids[0]))
			errtest.None(t, err)
			if diff := cmp.Diff(gone, missing); diff != "" || len(found) != n-len(gone) {
				t.Errorf("%d found, missing (-want +got):\n%s", len(found), diff)
			}
			if calls := len(f.asked("DescribeInstances")); calls > c.most {
				t.Errorf("%d calls, want at most %d", calls, c.most)
			}
		})
	}
}

func TestInstancesFailures(t *testing.T) {
	f := newFake(t, actions{"DescribeInstances": func(url.Values) reply { return refusal("UnauthorizedOperation", "no") }})
	c := f.client(t, testLimits)
	found, missing, err := c.Instances(t.Context(), []string{id(1)})
	if KindOf(err) != Unauthorized || found != nil || missing != nil {
		t.Errorf("a refused look is %v, %v, %v", found, missing, err)
	}
	if _, _, err := c.Instances(t.Context(), []string{"i-1; drop"}); KindOf(err) != Invalid {
		t.Errorf("an id that is none: %v", err)
	}
	if found, missing, err := c.Instances(t.Context(), nil); len(found)+len(missing) != 0 || err != nil {
		t.Errorf("no ids: %v, %v, %v", found, missing, err)
	}
}

func TestInstanceFields(t *testing.T) {
	const more = `<stateReason><code>Client.UserInitiatedShutdown</code><message>m</message></stateReason><reason>User initiated (2025)</reason>
<instanceType>m5.large</instanceType><imageId>ami-1</imageId><placement><availabilityZone>eu-1a</availabilityZone></placement>
<ipAddress>198.51.100.7</ipAddress><privateIpAddress>10.0.0.7</privateIpAddress><launchTime>2025-11-19T10:25:32.000Z</launchTime>
<instanceLifecycle>spot</instanceLifecycle><clientToken>w-1</clientToken><hibernationOptions><configured>true</configured></hibernationOptions>
<rootDeviceType>ebs</rootDeviceType><subnetId>subnet-1</subnetId><keyName>k</keyName><groupSet><item><groupId>sg-1</groupId></item></groupSet>
<tagSet><item><key>a</key><value>b</value></item></tagSet>
<networkInterfaceSet><item><association><publicIp>198.51.100.7</publicIp><ipOwnerId>%s</ipOwnerId></association></item></networkInterfaceSet>`
	owner := "amazon"
	f := newFake(t, actions{"DescribeInstances": func(url.Values) reply {
		return fine("DescribeInstances", reservations(instanceXML(id(1), "stopped", fmt.Sprintf(more, owner))))
	}})
	c := f.client(t, testLimits)
	want := Instance{
		ID: id(1), State: Stopped, ReasonCode: "Client.UserInitiatedShutdown", ReasonMessage: "m", Transition: "User initiated (2025)",
		Type: "m5.large", ImageID: "ami-1", Zone: "eu-1a", SubnetID: "subnet-1", SecurityGroups: []string{"sg-1"}, KeyName: "k",
		PublicIP: "198.51.100.7", PrivateIP: "10.0.0.7", LaunchTime: time.Date(2025, 11, 19, 10, 25, 32, 0, time.UTC),
		ClientToken: "w-1", Spot: true, Hibernation: true, RootDevice: "ebs", Tags: map[string]string{"a": "b"},
	}
	for o, address := range map[string]Address{"amazon": AddressTransient, "123456789012": AddressElastic, "": AddressUnknown} {
		owner, want.Address = o, address
		found, _, err := c.Instances(t.Context(), []string{id(1)})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, found[id(1)]); diff != "" {
			t.Errorf("owner %q (-want +got):\n%s", o, diff)
		}
	}
	for code, cause := range map[string]Cause{
		"Client.UserInitiatedShutdown": CauseUser, "Client.UserInitiatedHibernate": CauseUser,
		"Client.InstanceInitiatedShutdown": CauseInstance, "Server.SpotInstanceTermination": CauseServer,
		"Server.InternalError": CauseServer, "": CauseUnknown, "Client.Novel": CauseUnknown,
	} {
		if got := (Instance{ReasonCode: code}).Cause(); got != cause {
			t.Errorf("%q is by %s, want %s", code, got, cause)
		}
	}
}

func TestErrorKinds(t *testing.T) {
	// The test exchanges the answer while a handler may read it: a dropped
	// connection does not order the two.
	var answer atomic.Pointer[reply]
	say := func(r reply) { answer.Store(&r) }
	f := newFake(t, actions{"StopInstances": func(url.Values) reply { return *answer.Load() }})
	c := f.client(t, testLimits)
	for _, k := range []struct {
		code, message string
		want          Kind
	}{
		{"RequestLimitExceeded", "slow down", Throttled},
		{"Throttling", "slow down", Throttled},
		{"InvalidInstanceID.NotFound", "The instance ID 'i-1' does not exist", NotFound},
		{"InvalidAMIID.NotFound", "no image", Invalid},
		{"UnauthorizedOperation", "no", Unauthorized},
		{"AuthFailure", "no", Unauthorized},
		{"ExpiredToken", "no", Unauthorized},
		{"InsufficientInstanceCapacity", "none left", Capacity},
		{"VcpuLimitExceeded", "quota", Capacity},
		{"UnsupportedHibernationConfiguration", "no", HibernateUnsupported},
		{"UnsupportedOperation", "instance is not ready to Hibernate yet", HibernateUnsupported},
		{"UnsupportedOperation", "Spot", Invalid},
		{"IncorrectInstanceState", "it is stopped", IncorrectState},
		{"OperationNotPermitted", "disableApiStop", Protected},
		{"IdempotentParameterMismatch", "other", Mismatch},
		{"InternalError", "sorry", Unreachable},
		{"Novelty", "?", Invalid},
	} {
		say(refusal(k.code, k.message))
		_, err := c.Terminate(t.Context(), id(1))
		if KindOf(err) != Invalid { // the fake knows no TerminateInstances
			t.Fatalf("an action that does not exist: %v", err)
		}
		_, err = c.Stop(t.Context(), id(1), false)
		var e *Error
		if !errors.As(err, &e) || e.Kind != k.want || e.Code != k.code || e.IDs[0] != id(1) || e.Region != "eu-test-1" {
			t.Errorf("%s (%s): %v, want kind %s", k.code, k.message, err, k.want)
		}
	}
	say(reply{drop: true})
	if _, err := c.Stop(t.Context(), id(1), false); KindOf(err) != Unreachable {
		t.Errorf("a lost answer: %v", err)
	}
	say(reply{status: 200, body: "<not xml"})
	if _, err := c.Stop(t.Context(), id(1), false); KindOf(err) != Unreachable {
		t.Errorf("an answer that is no XML: %v", err)
	}
	say(fine("StopInstances", "<instancesSet/>"))
	if _, err := c.Stop(t.Context(), id(1), false); err == nil {
		t.Error("an answer about nothing was taken")
	}
	ctx := deadline(t, -time.Second)
	if _, err := c.Stop(ctx, id(1), false); KindOf(err) != Canceled && KindOf(err) != Throttled {
		t.Errorf("a context that has ended: %v", err)
	}
}

func TestThrottlingIsRetriedWithinTheDeadline(t *testing.T) {
	left := 2
	f := newFake(t, actions{"StopInstances": func(url.Values) reply {
		if left--; left >= 0 {
			return refusal("RequestLimitExceeded", "slow down")
		}
		return fine("StopInstances", "<instancesSet>"+items("<instanceId>"+id(1)+"</instanceId><currentState><name>stopping</name></currentState><previousState><name>running</name></previousState>")+"</instancesSet>")
	}})
	c := f.client(t, testLimits)
	if s, err := c.Stop(t.Context(), id(1), false); err != nil || s.Current != Stopping || s.Previous != Running {
		t.Errorf("after two throttled tries: %+v, %v", s, err)
	}
	left = 100
	if _, err := c.Stop(t.Context(), id(1), false); KindOf(err) != Throttled || left != 97 {
		t.Errorf("throttled forever: %v after %d tries", err, 100-left)
	}
	slow := testLimits
	slow.MaxBackoff, slow.Attempts = time.Hour, 1000
	left = 1000
	before := len(f.asked("StopInstances"))
	if _, err := f.client(t, slow).Stop(deadline(t, 300*time.Millisecond), id(1), false); err == nil {
		t.Error("a call outlived its deadline")
	}
	if tries := len(f.asked("StopInstances")) - before; tries > 50 {
		t.Errorf("%d tries in 0.3 s: no backoff", tries)
	}
}

func TestRateLimit(t *testing.T) {
	f := newFake(t, actions{"DescribeInstanceStatus": func(url.Values) reply { return statusPage(0, 1, "running", "") }})
	c := f.client(t, Limits{ReadRate: 0.001, ReadBurst: 2})
	ctx := deadline(t, 20*time.Second)
	for n := range 3 {
		_, err := c.States(ctx)
		if n < 2 && err != nil || n == 2 && KindOf(err) != Throttled {
			t.Errorf("call %d: %v", n, err)
		}
	}
	if n := len(f.asked("DescribeInstanceStatus")); n != 2 {
		t.Errorf("%d calls were made with a burst of 2", n)
	}
}

func TestTags(t *testing.T) {
	f := newFake(t, actions{
		"CreateTags": func(v url.Values) reply { return fine("CreateTags", "<return>true</return>") },
		"DeleteTags": func(v url.Values) reply { return fine("DeleteTags", "<return>true</return>") },
		"DescribeTags": func(v url.Values) reply {
			tag := func(id, k, v string) string {
				return "<resourceId>" + id + "</resourceId><key>" + k + "</key><value>" + v + "</value>"
			}
			if v.Get("NextToken") == "" {
				return fine("DescribeTags", "<tagSet>"+items(tag(id(1), "a", "1"), tag(id(2), "a", "2"))+"</tagSet><nextToken>t</nextToken>")
			}
			return fine("DescribeTags", "<tagSet>"+items(tag(id(1), "b", "3"))+"</tagSet>")
		},
	})
	c := f.client(t, testLimits)
	tags, err := c.Tags(t.Context(), []string{id(1), id(2), id(3)})
	if diff := cmp.Diff(map[string]map[string]string{id(1): {"a": "1", "b": "3"}, id(2): {"a": "2"}}, tags); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if err := c.CreateTags(t.Context(), []string{id(1)}, map[string]string{"lull:draining": "true"}); err != nil {
		t.Error(err)
	}
	if got := f.asked("CreateTags")[0]; got.Get("ResourceId.1") != id(1) || got.Get("Tag.1.Key") != "lull:draining" || got.Get("Tag.1.Value") != "true" {
		t.Errorf("asked %v", got)
	}
	if err := c.DeleteTags(t.Context(), []string{id(1)}, []string{"lull:draining"}); err != nil {
		t.Error(err)
	}
	if got := f.asked("DeleteTags")[0]; got.Get("Tag.1.Key") != "lull:draining" || got.Has("Tag.1.Value") {
		t.Errorf("asked %v", got)
	}
	if err := c.CreateTags(t.Context(), nil, map[string]string{"a": "b"}); err != nil || len(f.asked("CreateTags")) != 1 {
		t.Errorf("tags for an empty list: %v", err)
	}
}

func TestPreflight(t *testing.T) {
	more := ""
	attribute := func(v url.Values) reply {
		name := v.Get("Attribute")
		return fine("DescribeInstanceAttribute", fmt.Sprintf("<%s><value>%v</value></%s>", name, name == "disableApiStop", name))
	}
	f := newFake(t, actions{
		"DescribeInstances": func(v url.Values) reply {
			if v.Get("InstanceId.1") != id(1) {
				return refusal("InvalidInstanceID.NotFound", "gone")
			}
			return fine("DescribeInstances", reservations(instanceXML(id(1), "running", more)))
		},
		"DescribeInstanceTypes": func(v url.Values) reply {
			return fine("DescribeInstanceTypes", "<instanceTypeSet>"+items("<instanceType>m5d.large</instanceType><instanceStorageSupported>true</instanceStorageSupported>")+"</instanceTypeSet>")
		},
		"DescribeAddresses": func(v url.Values) reply {
			return fine("DescribeAddresses", "<addressesSet>"+items("<publicIp>198.51.100.7</publicIp><instanceId>"+v.Get("Filter.1.Value.1")+"</instanceId>")+"</addressesSet>")
		},
		"DescribeInstanceAttribute": func(v url.Values) reply { return attribute(v) },
	})
	c := f.client(t, testLimits)
	checks := func(p Preflight) [5]Check {
		return [5]Check{p.InstanceStore, p.ChangesAddress, p.AutoScaling, p.Spot, p.StopProtected}
	}
	more = "<instanceType>m5d.large</instanceType><ipAddress>198.51.100.7</ipAddress><instanceLifecycle>spot</instanceLifecycle>" +
		"<tagSet><item><key>aws:autoscaling:groupName</key><value>g</value></item></tagSet>"
	for range 2 {
		p, err := c.Preflight(t.Context(), id(1))
		if want := [5]Check{{Set: true}, {Set: false}, {Set: true}, {Set: true}, {Set: true}}; err != nil || checks(p) != want {
			t.Errorf("checks %+v, %v", checks(p), err)
		}
	}
	if n := len(f.asked("DescribeInstanceTypes")); n != 1 {
		t.Errorf("an instance type was asked for %d times", n)
	}
	more = "<instanceType>t3.large</instanceType>"
	attribute = func(url.Values) reply { return refusal("UnauthorizedOperation", "no") }
	f.actions["DescribeInstanceTypes"] = func(url.Values) reply { return fine("DescribeInstanceTypes", "<instanceTypeSet/>") }
	p, err := c.Preflight(t.Context(), id(1))
	if err != nil || KindOf(p.StopProtected.Err) != Unauthorized || p.InstanceStore.Err == nil {
		t.Errorf("checks that fail: %+v, %v", p, err)
	}
	if p.Spot.Err != nil || p.ChangesAddress != (Check{}) {
		t.Errorf("checks that do not fail: %+v", p)
	}
	if _, err := c.Preflight(t.Context(), id(2)); KindOf(err) != NotFound {
		t.Errorf("an instance that is not there: %v", err)
	}
}

func TestFind(t *testing.T) {
	f := newFake(t, actions{
		"DescribeImages": func(url.Values) reply {
			var parts []string
			for n := range 250 {
				parts = append(parts, fmt.Sprintf("<imageId>ami-%d</imageId><creationDate>2025-03-01T00:00:00.000Z</creationDate>", n))
			}
			return fine("DescribeImages", "<imagesSet>"+items(parts...)+"</imagesSet>")
		},
		"DescribeInstances": func(v url.Values) reply {
			if v.Get("NextToken") == "" && len(filtersOf(v)["image-id"]) != 50 {
				return fine("DescribeInstances", reservations(instanceXML(id(2), "running", ""), instanceXML(id(1), "stopped", ""))+"<nextToken>t</nextToken>")
			}
			return fine("DescribeInstances", reservations(instanceXML(id(3), "running", ""), instanceXML(id(1), "stopped", "")))
		},
	})
	c := f.client(t, testLimits)
	ids := func(q Query) []string {
		t.Helper()
		found, err := c.Find(t.Context(), q)
		errtest.None(t, err)
		var out []string
		for _, i := range found {
			out = append(out, i.ID)
		}
		return out
	}
	want := []string{id(1), id(2), id(3)}
	if diff := cmp.Diff(want, ids(Query{Tags: map[string]string{"lull:managed-by": "f1", "x": ""}, ClientToken: "w"})); diff != "" {
		t.Errorf("by tag:\n%s", diff)
	}
	filters := filtersOf(f.asked("DescribeInstances")[0])
	for name, value := range map[string]string{"tag:lull:managed-by": "f1", "tag-key": "x", "client-token": "w", "instance-state-name": "pending"} {
		if len(filters[name]) == 0 || filters[name][0] != value {
			t.Errorf("filter %s is %v, want %s", name, filters[name], value)
		}
	}
	if diff := cmp.Diff(want, ids(Query{ImageName: "cml*", Terminated: true})); diff != "" {
		t.Errorf("by image:\n%s", diff)
	}
	calls := f.asked("DescribeInstances")
	if last := filtersOf(calls[len(calls)-1]); len(last["image-id"]) != 50 || last["instance-state-name"] != nil {
		t.Errorf("the last batch of images was asked for by %v", last)
	}
}

// TestVolumes checks that sizes and types are read with a filter, many volumes
// per call, and that an unknown ID is missing from the result.
func TestVolumes(t *testing.T) {
	f := newFake(t, map[string]func(url.Values) reply{"DescribeVolumes": func(v url.Values) reply {
		if v.Get("Filter.1.Name") != "volume-id" || v.Get("VolumeId.1") != "" {
			return refusal("InvalidParameterValue", "ask by a filter")
		}
		return reply{status: 200, body: `<DescribeVolumesResponse><volumeSet><item><volumeId>vol-1</volumeId><size>73</size><volumeType>gp3</volumeType></item></volumeSet></DescribeVolumesResponse>`}
	}})
	ids := []string{"vol-1"}
	for i := range 300 {
		ids = append(ids, fmt.Sprintf("vol-unknown-%d", i))
	}
	got, err := f.client(t, Limits{}).Volumes(t.Context(), ids)
	if err != nil || len(got) != 1 || got["vol-1"] != (Volume{Type: "gp3", GiB: 73}) || len(f.calls) != 2 {
		t.Errorf("%v, %v after %d calls", got, err, len(f.calls))
	}
}

func TestRegions(t *testing.T) {
	f := newFake(t, map[string]func(url.Values) reply{"DescribeRegions": func(url.Values) reply {
		return fine("DescribeRegions", "<regionInfo><item><regionName>us-east-1</regionName></item><item><regionName>eu-north-1</regionName></item></regionInfo>")
	}})
	got, err := f.client(t, Limits{}).Regions(t.Context())
	if err != nil || !slices.Equal(got, []string{"us-east-1", "eu-north-1"}) {
		t.Errorf("%v, %v", got, err)
	}
}

package ec2

import (
	"encoding/base64"
	"errors"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
)

func TestRun(t *testing.T) {
	var tries atomic.Int32
	f := newFake(t, actions{"RunInstances": func(v url.Values) reply {
		if tries.Add(1) == 1 {
			return reply{drop: true} // launched, but the answer is lost
		}
		return fine("RunInstances", "<instancesSet>"+items(instanceXML(id(1), "pending", ""))+"</instancesSet>")
	}})
	c := f.client(t, testLimits)
	l := Launch{
		ClientToken: "w-1-g1", ImageID: "ami-1", InstanceType: "m5zn.metal", SubnetID: "subnet-1", SecurityGroupIDs: []string{"sg-1", "sg-2"},
		KeyName: "k", IAMInstanceProfile: "lull", UserData: "#!/bin/sh\n", Tags: map[string]string{"Name": "w", "a": "1", "b": "2"},
		Hibernation: true, RootVolume: &RootVolume{Device: "/dev/sda1", SizeGiB: 100, Type: "gp3", Encrypted: true},
	}
	i, err := c.Run(t.Context(), l)
	if err != nil || i.ID != id(1) || i.State != Pending {
		t.Fatalf("%+v, %v", i, err)
	}
	calls := f.asked("RunInstances")
	if len(calls) != 2 || calls[0].Encode() != calls[1].Encode() {
		t.Errorf("%d calls, the same: %v", len(calls), len(calls) == 2 && calls[0].Encode() == calls[1].Encode())
	}
	got := calls[1]
	for key, want := range map[string]string{
		"ClientToken": "w-1-g1", "ImageId": "ami-1", "InstanceType": "m5zn.metal", "SubnetId": "subnet-1", "SecurityGroupId.2": "sg-2",
		"KeyName": "k", "IamInstanceProfile.Name": "lull", "UserData": base64.StdEncoding.EncodeToString([]byte(l.UserData)),
		"MinCount": "1", "MaxCount": "1", "TagSpecification.1.ResourceType": "instance", "TagSpecification.1.Tag.1.Key": "Name",
		"TagSpecification.1.Tag.3.Value": "2", "TagSpecification.2.ResourceType": "volume", "HibernationOptions.Configured": "true",
		"BlockDeviceMapping.1.DeviceName": "/dev/sda1", "BlockDeviceMapping.1.Ebs.Encrypted": "true", "BlockDeviceMapping.1.Ebs.VolumeSize": "100",
		"MetadataOptions.HttpTokens": "required", "MetadataOptions.InstanceMetadataTags": "enabled", "InstanceInitiatedShutdownBehavior": "stop",
	} {
		if got.Get(key) != want {
			t.Errorf("%s is %q, want %q", key, got.Get(key), want)
		}
	}
	_, err = c.Run(t.Context(), Launch{ClientToken: strings.Repeat("x", 65), UserData: strings.Repeat("x", maxUserData+1)})
	for _, field := range []string{"client_token", "image_id", "instance_type", "user_data"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s is not at fault: %v", field, err)
		}
	}
}

func TestNewestImage(t *testing.T) {
	image := func(id, created string) string {
		return "<imageId>" + id + "</imageId><name>cml</name><creationDate>" + created + "</creationDate><imageState>available</imageState>"
	}
	first := items(image("ami-b", "2025-03-01T00:00:00.000Z"), image("ami-a", "2025-01-01T00:00:00.000Z"))
	second := items(image("ami-d", "2025-06-01T00:00:00.000Z"), image("ami-c", "2025-06-01T00:00:00.000Z"))
	f := newFake(t, actions{"DescribeImages": func(v url.Values) reply {
		filters := filtersOf(v)
		if v.Get("Owner.1") != "self" || filters["name"][0] != "cisco-cml2.9*" || filters["state"][0] != "available" {
			return refusal("InvalidParameterValue", "not that")
		}
		if v.Get("NextToken") == "" {
			return fine("DescribeImages", "<imagesSet>"+first+"</imagesSet><nextToken>t</nextToken>")
		}
		return fine("DescribeImages", "<imagesSet>"+second+"</imagesSet>")
	}})
	c := f.client(t, testLimits)
	if i, err := c.NewestImage(t.Context(), "cisco-cml2.9*", nil); err != nil || i.ID != "ami-c" {
		t.Errorf("newest is %+v, %v", i, err)
	}
	second = items(image("ami-e", "soon"))
	if _, err := c.NewestImage(t.Context(), "cisco-cml2.9*", nil); err == nil {
		t.Error("a creation date that is none was passed over")
	}
	first, second = "", ""
	if _, err := c.NewestImage(t.Context(), "cisco-cml2.9*", nil); !errors.Is(err, ErrNoImage) {
		t.Errorf("no image: %v", err)
	}
	if _, err := c.NewestImage(t.Context(), "", nil); KindOf(err) != Invalid {
		t.Errorf("no pattern: %v", err)
	}
}

func TestStopHibernate(t *testing.T) {
	accepted := fine("StopInstances", "<instancesSet>"+items("<instanceId>"+id(1)+"</instanceId><currentState><name>stopping</name></currentState>")+"</instancesSet>")
	var hibernate, plain reply
	f := newFake(t, actions{"StopInstances": func(v url.Values) reply {
		if v.Get("Hibernate") == "true" {
			return hibernate
		}
		return plain
	}})
	c := f.client(t, testLimits)
	for _, k := range []struct {
		name             string
		hibernate, plain reply
		ask              bool
		hibernating      bool
		fallback         string
		want             Kind
	}{
		{"plain", refusal("X", ""), accepted, false, false, "", ""},
		{"hibernates", accepted, refusal("X", ""), true, true, "", ""},
		{"not configured", refusal("UnsupportedHibernationConfiguration", "no agent"), accepted, true, false, "no agent", ""},
		{"not ready", refusal("UnsupportedOperation", "not ready to hibernate yet"), accepted, true, false, "not ready", ""},
		{"wrong state", refusal("IncorrectInstanceState", "it is pending"), accepted, true, false, "", IncorrectState},
		{"throttled", refusal("RequestLimitExceeded", "slow"), accepted, true, false, "", Throttled},
		{"both refused", refusal("UnsupportedHibernationConfiguration", "no agent"), refusal("OperationNotPermitted", "protected"), true, false, "no agent", Protected},
	} {
		hibernate, plain = k.hibernate, k.plain
		s, err := c.Stop(t.Context(), id(1), k.ask)
		if KindOf(err) != k.want || s.Hibernating != k.hibernating || (s.Fallback == "") != (k.fallback == "") || !strings.Contains(s.Fallback, k.fallback) {
			t.Errorf("%s: %+v, %v", k.name, s, err)
		}
	}
}

func TestStartAndTerminate(t *testing.T) {
	changed := func(state string) func(url.Values) reply {
		return func(v url.Values) reply {
			return fine(v.Get("Action"), "<instancesSet>"+items("<instanceId>"+v.Get("InstanceId.1")+"</instanceId><currentState><name>"+state+"</name></currentState>")+"</instancesSet>")
		}
	}
	f := newFake(t, actions{"StartInstances": changed("pending"), "TerminateInstances": changed("shutting-down")})
	c := f.client(t, testLimits)
	if ch, err := c.Start(t.Context(), id(1)); err != nil || ch.Current != Pending {
		t.Errorf("start: %+v, %v", ch, err)
	}
	if ch, err := c.Terminate(t.Context(), id(1)); err != nil || ch.Current != ShuttingDown {
		t.Errorf("terminate: %+v, %v", ch, err)
	}
}

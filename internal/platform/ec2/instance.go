package ec2

import (
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"
)

// State is EC2's name for the state of an instance.
type State string

// EC2's states.
const (
	Pending      State = "pending"
	Running      State = "running"
	Stopping     State = "stopping"
	Stopped      State = "stopped"
	ShuttingDown State = "shutting-down"
	Terminated   State = "terminated"
)

// WorkerStatus returns the status of a worker whose instance is in state s.
func (s State) WorkerStatus() string {
	switch s {
	case Pending:
		return "PROVISIONING"
	case Running:
		return "RUNNING"
	case Stopping:
		return "STOPPING"
	case Stopped:
		return "STOPPED"
	case ShuttingDown:
		return "TERMINATING"
	case Terminated:
		return "TERMINATED"
	}
	return "UNKNOWN"
}

var instanceID = regexp.MustCompile(`^i-(?:[0-9a-f]{8}|[0-9a-f]{17})$`)

// ValidID reports whether id has the form of an instance id.
func ValidID(id string) bool { return instanceID.MatchString(id) }

// Address is the kind of an instance's public address.
type Address string

// The kinds of public address.
const (
	AddressNone      Address = "none"
	AddressElastic   Address = "elastic"   // survives a stop
	AddressTransient Address = "transient" // changes with a stop
	AddressUnknown   Address = "unknown"   // not reported
)

// Cause describes why an instance is in its state.
type Cause string

// The causes.
const (
	CauseUser     Cause = "user"     // an API call: console, CLI, another program, or lull
	CauseInstance Cause = "instance" // a shutdown from inside
	CauseServer   Cause = "server"   // AWS: host failure, Spot, capacity
	CauseUnknown  Cause = "unknown"
)

// Instance describes an EC2 instance.
type Instance struct {
	ID             string            `json:"id"`
	State          State             `json:"state"`
	ReasonCode     string            `json:"reason_code,omitempty"`
	ReasonMessage  string            `json:"reason_message,omitempty"`
	Transition     string            `json:"transition,omitempty"` // such as "User initiated (2025-11-19 10:25:32 GMT)"
	Type           string            `json:"type"`
	ImageID        string            `json:"image_id"`
	Zone           string            `json:"zone,omitempty"`
	SubnetID       string            `json:"subnet_id,omitempty"`
	SecurityGroups []string          `json:"security_groups,omitempty"`
	KeyName        string            `json:"key_name,omitempty"`
	PublicIP       string            `json:"public_ip,omitempty"`
	PrivateIP      string            `json:"private_ip,omitempty"`
	Address        Address           `json:"address"`
	LaunchTime     time.Time         `json:"launch_time"` // time of the last start
	ClientToken    string            `json:"client_token,omitempty"`
	Spot           bool              `json:"spot,omitempty"`
	Hibernation    bool              `json:"hibernation,omitempty"` // configured at launch
	RootDevice     string            `json:"root_device,omitempty"` // "ebs" or "instance-store"
	Volumes        []string          `json:"volumes,omitempty"`     // ids of the attached volumes
	Tags           map[string]string `json:"tags,omitempty"`
}

// Cause returns what brought the instance into its state, as derived from EC2's
// StateReason.
func (i Instance) Cause() Cause {
	switch {
	case strings.HasPrefix(i.ReasonCode, "Server."):
		return CauseServer
	case i.ReasonCode == "Client.InstanceInitiatedShutdown":
		return CauseInstance
	case i.ReasonCode == "Client.UserInitiatedShutdown", i.ReasonCode == "Client.UserInitiatedHibernate":
		return CauseUser
	}
	return CauseUnknown
}

func instanceOf(in types.Instance) Instance {
	out := Instance{
		ID: aws.ToString(in.InstanceId), Type: string(in.InstanceType), ImageID: aws.ToString(in.ImageId),
		Transition: aws.ToString(in.StateTransitionReason), SubnetID: aws.ToString(in.SubnetId),
		KeyName: aws.ToString(in.KeyName), PublicIP: aws.ToString(in.PublicIpAddress),
		PrivateIP: aws.ToString(in.PrivateIpAddress), LaunchTime: aws.ToTime(in.LaunchTime),
		ClientToken: aws.ToString(in.ClientToken), Spot: in.InstanceLifecycle == types.InstanceLifecycleTypeSpot,
		RootDevice: string(in.RootDeviceType), Tags: tagsOf(in.Tags),
	}
	if in.State != nil {
		out.State = State(in.State.Name)
	}
	if in.StateReason != nil {
		out.ReasonCode, out.ReasonMessage = aws.ToString(in.StateReason.Code), aws.ToString(in.StateReason.Message)
	}
	if in.Placement != nil {
		out.Zone = aws.ToString(in.Placement.AvailabilityZone)
	}
	if in.HibernationOptions != nil {
		out.Hibernation = aws.ToBool(in.HibernationOptions.Configured)
	}
	for _, g := range in.SecurityGroups {
		out.SecurityGroups = append(out.SecurityGroups, aws.ToString(g.GroupId))
	}
	for _, m := range in.BlockDeviceMappings {
		if m.Ebs != nil && aws.ToString(m.Ebs.VolumeId) != "" {
			out.Volumes = append(out.Volumes, *m.Ebs.VolumeId)
		}
	}
	slices.Sort(out.Volumes)
	out.Address = addressOf(in)
	return out
}

// addressOf derives the kind of the public address from its owner in the network
// interfaces: "amazon" owns an automatic address, the account owns an Elastic IP.
func addressOf(in types.Instance) Address {
	if aws.ToString(in.PublicIpAddress) == "" {
		return AddressNone
	}
	for _, n := range in.NetworkInterfaces {
		if n.Association == nil || aws.ToString(n.Association.PublicIp) != aws.ToString(in.PublicIpAddress) {
			continue
		}
		switch owner := aws.ToString(n.Association.IpOwnerId); owner {
		case "":
		case "amazon":
			return AddressTransient
		default:
			return AddressElastic
		}
	}
	return AddressUnknown
}

func tagsOf(in []types.Tag) map[string]string {
	if len(in) == 0 {
		return nil
	}
	out := make(map[string]string, len(in))
	for _, t := range in {
		out[aws.ToString(t.Key)] = aws.ToString(t.Value)
	}
	return out
}

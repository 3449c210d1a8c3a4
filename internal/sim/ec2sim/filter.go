package ec2sim

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"lull/internal/sim/wire"
	"lull/internal/sim/world"
)

// filter is one Filter.N. It matches if any of its values does.
type filter struct {
	name   string
	values []string
}

// Limits of filters, as in EC2.
const (
	maxFilters = 50
	maxValues  = 200
)

// filters parses all Filter.N, and rejects names that are not in known. A name in
// known that ends in ":" stands for all names with that prefix.
func filters(f wire.Form, known ...string) ([]filter, error) {
	groups := f.Groups("Filter")
	if len(groups) > maxFilters {
		return nil, world.Refuse("FilterLimitExceeded", "%d filters are more than %d", len(groups), maxFilters)
	}
	out := make([]filter, 0, len(groups))
	for _, g := range groups {
		x := filter{name: f.Get(g + "Name"), values: f.List(g + "Value")}
		ok := slices.ContainsFunc(known, func(k string) bool {
			return k == x.name || strings.HasSuffix(k, ":") && strings.HasPrefix(x.name, k) && len(x.name) > len(k)
		})
		if !ok {
			return nil, world.Refuse("InvalidParameterValue", "The filter '%.64s' is invalid", x.name)
		}
		if len(x.values) == 0 {
			return nil, world.Refuse("InvalidParameterValue", "The filter '%s' has no values", x.name)
		}
		if len(x.values) > maxValues {
			return nil, world.Refuse("FilterLimitExceeded", "The filter '%s' has more than %d values", x.name, maxValues)
		}
		out = append(out, x)
	}
	return out, nil
}

// any reports whether one of the values matches the pattern of a filter.
func (f filter) any(values ...string) bool {
	for _, p := range f.values {
		for _, v := range values {
			if wildcard(p, v) {
				return true
			}
		}
	}
	return false
}

// wildcard reports whether s matches pattern, in which * and ? are wildcards and \
// makes the next character literal. It takes at most len(pattern) times len(s) steps.
func wildcard(pattern, s string) bool {
	if !strings.ContainsAny(pattern, `*?\`) {
		return pattern == s
	}
	p, k, star, mark := 0, 0, -1, 0
	for k < len(s) {
		if p < len(pattern) {
			lit, width := pattern[p], 1
			if lit == '\\' && p+1 < len(pattern) {
				lit, width = pattern[p+1], 2
			}
			switch {
			case width == 1 && lit == '*':
				star, mark = p, k
				p++
				continue
			case width == 1 && lit == '?' || lit == s[k]:
				p += width
				k++
				continue
			}
		}
		if star < 0 {
			return false
		}
		p = star + 1
		mark++
		k = mark
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}

var instanceFilters = []string{
	"instance-id", "instance-state-name", "instance-state-code", "instance-type", "image-id", "client-token",
	"tag:", "tag-key", "subnet-id", "vpc-id", "availability-zone", "private-ip-address", "ip-address", "owner-id",
	"reservation-id", "iam-instance-profile.arn", "hibernation-options.configured", "instance-lifecycle",
	"root-device-type", "launch-time", "key-name", "group-id", "instance.group-id", "architecture",
}

func (f filter) instance(i *world.Instance, wire time.Time) bool {
	if key, ok := strings.CutPrefix(f.name, "tag:"); ok {
		v, ok := i.TagsAt(wire).Get(key)
		return ok && f.any(v)
	}
	switch f.name {
	case "instance-id":
		return f.any(i.ID)
	case "instance-state-name":
		return f.any(string(i.State))
	case "instance-state-code":
		return f.any(strconv.Itoa(i.State.Code()))
	case "instance-type":
		return f.any(i.Type)
	case "image-id":
		return f.any(i.Image)
	case "client-token":
		return f.any(i.ClientToken)
	case "tag-key":
		return slices.ContainsFunc(i.TagsAt(wire), func(t world.Tag) bool { return f.any(t.Key) })
	case "subnet-id":
		return f.any(i.Subnet)
	case "vpc-id":
		return f.any(i.VPC)
	case "availability-zone":
		return f.any(i.Zone)
	case "private-ip-address":
		return i.PrivateIP.IsValid() && f.any(i.PrivateIP.String())
	case "ip-address":
		return i.PublicIP.IsValid() && f.any(i.PublicIP.String())
	case "owner-id":
		return f.any(i.Account)
	case "reservation-id":
		return f.any(i.Reservation)
	case "iam-instance-profile.arn":
		return i.Profile != "" && f.any(profileARN(i))
	case "hibernation-options.configured":
		return f.any(strconv.FormatBool(i.Hibernation))
	case "instance-lifecycle":
		return i.Spot && f.any("spot")
	case "root-device-type":
		return f.any(rootType(i))
	case "launch-time":
		return f.any(stamp(i.Launched))
	case "key-name":
		return f.any(i.Key)
	case "group-id", "instance.group-id":
		return f.any(i.Groups...)
	case "architecture":
		return f.any(arch(i.Type))
	}
	return false
}

// matcher returns the conjunction of filters; nil matches everything.
func matcher(fs []filter) func(*world.Instance, time.Time) bool {
	if len(fs) == 0 {
		return nil
	}
	return func(i *world.Instance, wire time.Time) bool {
		for _, f := range fs {
			if !f.instance(i, wire) {
				return false
			}
		}
		return true
	}
}

func profileARN(i *world.Instance) string {
	return "arn:aws:iam::" + i.Account + ":instance-profile/" + i.Profile
}

func rootType(i *world.Instance) string {
	if i.InstanceStore {
		return "instance-store"
	}
	return "ebs"
}

func arch(typ string) string {
	if t, ok := world.LookupType(typ); ok && t.Arm {
		return "arm64"
	}
	return "x86_64"
}

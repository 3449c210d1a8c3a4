package settings

import (
	"errors"
	"fmt"
	"path"
	"regexp"
	"strings"

	"lull/internal/core/failure"
)

// Region is where in one AWS region workers are launched.
type Region struct {
	Region           string            `json:"region" yaml:"region"`
	SecurityGroupIDs []string          `json:"security_group_ids,omitempty" yaml:"security_group_ids"`
	SubnetID         string            `json:"subnet_id,omitempty" yaml:"subnet_id"`
	KeyName          string            `json:"key_name,omitempty" yaml:"key_name"`
	DefaultTags      map[string]string `json:"default_tags,omitempty" yaml:"default_tags"`
	// AMINamePattern selects images by name. Discovery also finds instances of these
	// images, besides those with the fleet's tag.
	AMINamePattern string `json:"ami_name_pattern,omitempty" yaml:"ami_name_pattern"`
}

var regionName = regexp.MustCompile(`^[a-z]{2,4}(-[a-z]+){1,2}-[0-9]{1,2}$`)

// IsRegion reports whether name looks like the name of an AWS region.
func IsRegion(name string) bool { return regionName.MatchString(name) }

func (r Region) validate(field string) error {
	var errs []error
	if !regionName.MatchString(r.Region) {
		errs = append(errs, failure.Invalidf(field+".region", "%.40q is not the name of a region", r.Region))
	}
	for _, id := range r.SecurityGroupIDs {
		if !strings.HasPrefix(id, "sg-") || len(id) > 40 {
			errs = append(errs, failure.Invalidf(field+".security_group_ids", "%.40q is not the id of a security group", id))
		}
	}
	if r.SubnetID != "" && (!strings.HasPrefix(r.SubnetID, "subnet-") || len(r.SubnetID) > 48) {
		errs = append(errs, failure.Invalidf(field+".subnet_id", "%.40q is not the id of a subnet", r.SubnetID))
	}
	if len(r.DefaultTags) > 40 {
		errs = append(errs, failure.Invalidf(field+".default_tags", "%d tags, the limit is 40: EC2 takes 50, and lull adds its own", len(r.DefaultTags)))
	}
	if _, err := path.Match(r.AMINamePattern, ""); err != nil {
		errs = append(errs, failure.Invalidf(field+".ami_name_pattern", "not a valid pattern"))
	}
	return errors.Join(errs...)
}

// Launchable returns an error that names what r lacks for launching workers; nil if
// nothing.
func (r Region) Launchable() error {
	if r.SubnetID == "" || len(r.SecurityGroupIDs) == 0 {
		return fmt.Errorf("cannot launch in region %s: its configuration has no subnet_id or no security_group_ids", r.Region)
	}
	return nil
}

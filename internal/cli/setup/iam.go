package setup

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/protocol/tags"
)

// policyDocument is an IAM policy, with the names that IAM uses.
type policyDocument struct {
	Version   string
	Statement []policyStatement
}

type policyStatement struct {
	Sid       string
	Effect    string
	Principal map[string]string `json:",omitempty"`
	Action    []string
	Resource  string                         `json:",omitempty"`
	Condition map[string]map[string][]string `json:",omitempty"`
}

// agentRights returns the minimal IAM policy of an agent: to describe tags and
// instances (which IAM allows for all or none), and to stop and tag its own instance.
// terminate also allows terminating it.
//
// ec2:InstanceID is the instance that a call is about. ec2:SourceInstanceARN is the
// instance whose credentials are used. EC2 sets both.
func agentRights(partition, prefix string, terminate bool) policyDocument {
	self := func() map[string]map[string][]string {
		return map[string]map[string][]string{
			"ArnLike": {"ec2:SourceInstanceARN": {"arn:" + partition + ":ec2:*:*:instance/${ec2:InstanceID}"}},
		}
	}
	status, since, action := tags.StateKeys(prefix)
	mark := self()
	mark["ForAllValues:StringEquals"] = map[string][]string{"aws:TagKeys": {status, since, action, prefix + "ttl-deadline"}}
	power := []string{"ec2:StopInstances"}
	if terminate {
		power = append(power, "ec2:TerminateInstances")
	}
	instances := "arn:" + partition + ":ec2:*:*:instance/*"
	return policyDocument{Version: "2012-10-17", Statement: []policyStatement{
		{Sid: "See", Effect: "Allow", Action: []string{"ec2:DescribeInstances", "ec2:DescribeTags"}, Resource: "*"},
		{Sid: "StopItself", Effect: "Allow", Action: power, Resource: instances, Condition: self()},
		{Sid: "MarkItself", Effect: "Allow", Action: []string{"ec2:CreateTags"}, Resource: instances, Condition: mark},
	}}
}

// agentTrust is the trust policy that lets EC2 instances assume the role.
var agentTrust = policyDocument{Version: "2012-10-17", Statement: []policyStatement{
	{Sid: "Instances", Effect: "Allow", Principal: map[string]string{"Service": "ec2.amazonaws.com"}, Action: []string{"sts:AssumeRole"}},
}}

func policyJSON(p policyDocument) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	_ = e.Encode(p) // cannot fail: plain data, written to memory
	return b.String()
}

func (c verbs) agentIAM() *cobra.Command {
	var terminate, script bool
	var prefix, name, partition string
	cmd := &cobra.Command{
		Use:   "iam",
		Short: "Print the minimal IAM policy for the agent", Example: "  lull agent iam\n  lull agent iam --terminate",
		Long: `Print the minimal IAM policy for the agent. It allows an instance to read tags and
instances, to stop only itself, and to write only its own state tags and its
ttl-deadline tag (for lull agent ttl extend). --script prints the aws commands that
create the role and instance profile. Review them, then run them:

  lull agent iam --script | sh

TerminateInstances is only included with --terminate, which a ttl-action or
on-complete of terminate needs.`,
		Args: term.Args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			if !strings.HasSuffix(prefix, ":") {
				return term.Usage(fmt.Errorf("cannot use --prefix %q: want a word that ends in a colon", prefix))
			}
			if strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+=,.@_-") != "" || name == "" || len(name) > 64 {
				return term.Usage(fmt.Errorf("cannot use --name %q: want up to 64 letters, digits and +=,.@_-", name))
			}
			if partition != "aws" && partition != "aws-cn" && partition != "aws-us-gov" {
				return term.Usage(fmt.Errorf("cannot use --partition %q: want aws, aws-cn or aws-us-gov", partition))
			}
			p := agentRights(partition, prefix, terminate)
			if script {
				_, err := io.WriteString(c.Out, iamScript(name, p))
				return err
			}
			_, err := io.WriteString(c.Out, policyJSON(p))
			return err
		},
	}
	cmd.Flags().BoolVar(&terminate, "terminate", false, "allow the instance to terminate itself")
	cmd.Flags().BoolVar(&script, "script", false, "print the aws commands that create the role and instance profile")
	cmd.Flags().StringVar(&prefix, "prefix", tags.DefaultPrefix, "prefix of the state tags")
	cmd.Flags().StringVar(&partition, "partition", "aws", "AWS partition: aws, aws-cn or aws-us-gov")
	cmd.Flags().StringVar(&name, "name", "lull-agent", "name of the role, its policy and the instance profile")
	return cmd
}

func iamScript(name string, p policyDocument) string {
	var b strings.Builder
	fmt.Fprintf(&b, "set -eu\naws iam create-role --role-name %s --assume-role-policy-document '%s'\n", name, compact(agentTrust))
	fmt.Fprintf(&b, "aws iam put-role-policy --role-name %s --policy-name %s --policy-document '%s'\n", name, name, compact(p))
	fmt.Fprintf(&b, "aws iam create-instance-profile --instance-profile-name %s\n", name)
	fmt.Fprintf(&b, "aws iam add-role-to-instance-profile --instance-profile-name %s --role-name %s\n", name, name)
	return b.String()
}

// compact returns p as one line. No value contains a quote.
func compact(p policyDocument) string {
	b, _ := json.Marshal(p) // plain data
	return string(b)
}

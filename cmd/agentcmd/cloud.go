//go:build linux && !portable

package agentcmd

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"lull/internal/agent"
	"lull/internal/platform/ec2"
	"lull/internal/platform/imds"
)

// firmware reports whether the firmware or hypervisor names EC2 as vendor. known is
// false if no names can be read. It works before the network is up, so that an
// instance whose metadata service does not answer yet is not taken for a machine
// without a cloud.
func firmware(root string) (isEC2, known bool) {
	for _, f := range []string{"sys/class/dmi/id/sys_vendor", "sys/class/dmi/id/board_vendor"} {
		if b, err := os.ReadFile(root + f); err == nil {
			known = true
			if strings.TrimSpace(string(b)) == "Amazon EC2" {
				return true, true
			}
		}
	}
	b, err := os.ReadFile(root + "sys/hypervisor/uuid") // Xen instances
	if err == nil && strings.HasPrefix(strings.ToLower(string(b)), "ec2") {
		return true, true
	}
	return false, known
}

// ec2Edge is the connection to EC2 of the instance that this process runs on. The
// instance's identity is read on first use, and retried until the metadata service
// answers.
type ec2Edge struct {
	cfg  Settings
	imds *imds.Client
	http *http.Client

	mu    sync.Mutex
	known imds.Identity
	api   *ec2.Client
}

var (
	_ agent.Cloud     = (*ec2Edge)(nil)
	_ agent.TagSource = describedTags{}
)

func newEC2Edge(cfg Settings, m *agent.Meter) *ec2Edge {
	return &ec2Edge{cfg: cfg, http: &http.Client{Transport: m.Transport(http.ProxyFromEnvironment)},
		imds: imds.New(imds.Options{Endpoint: cfg.IMDSEndpoint, HTTP: &http.Client{Transport: m.Transport(nil)}})}
}

// identity returns the instance's identity document.
func (e *ec2Edge) identity(ctx context.Context) (imds.Identity, error) {
	e.mu.Lock()
	known := e.known
	e.mu.Unlock()
	if known.InstanceID != "" {
		return known, nil
	}
	i, err := e.imds.Identity(ctx)
	if err != nil {
		return imds.Identity{}, err
	}
	i.Region = cmp.Or(e.cfg.Region, i.Region)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.known = i
	return i, nil
}

// instance returns the agent's access to EC2, for this instance only.
func (e *ec2Edge) instance(ctx context.Context) (agent.EC2, error) {
	i, err := e.identity(ctx)
	if err != nil {
		return agent.EC2{}, fmt.Errorf("cannot determine which instance this is: %w", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.api == nil {
		cfg, err := (ec2.Access{HTTP: e.http, MetadataEndpoint: e.cfg.IMDSEndpoint}).Load(ctx, i.Region)
		if err != nil {
			return agent.EC2{}, err
		}
		// Three attempts fit into the agent's time limits of 10 s.
		e.api = ec2.New(cfg, e.cfg.EC2Endpoint, ec2.Limits{Attempts: 3, MaxBackoff: 2 * time.Second})
	}
	return agent.EC2{Client: e.api, ID: i.InstanceID}, nil
}

// Describe implements agent.Cloud.
func (e *ec2Edge) Describe(ctx context.Context) (agent.Instance, error) {
	i, err := e.instance(ctx)
	if err != nil {
		return agent.Instance{}, err
	}
	return i.Describe(ctx)
}

// WriteTags implements agent.Cloud.
func (e *ec2Edge) WriteTags(ctx context.Context, t map[string]string) error {
	i, err := e.instance(ctx)
	if err != nil {
		return err
	}
	return i.WriteTags(ctx, t)
}

// Stop implements agent.Cloud.
func (e *ec2Edge) Stop(ctx context.Context, hibernate bool) (string, error) {
	i, err := e.instance(ctx)
	if err != nil {
		return "", err
	}
	return i.Stop(ctx, hibernate)
}

// Terminate implements agent.Cloud.
func (e *ec2Edge) Terminate(ctx context.Context) error {
	i, err := e.instance(ctx)
	if err != nil {
		return err
	}
	return i.Terminate(ctx)
}

// describedTags reads the instance's tags with DescribeTags, for instances whose
// metadata service does not show them.
type describedTags struct{ *ec2Edge }

// Tags implements agent.TagSource.
func (d describedTags) Tags(ctx context.Context) (map[string]string, error) {
	i, err := d.instance(ctx)
	if err != nil {
		return nil, err
	}
	return i.Tags(ctx)
}

// findCloud returns the ec2Edge of this machine; nil if this is not an EC2 instance.
// If it returns an error too, each use of the edge retries. root is the directory
// below which the firmware's names are read.
func findCloud(ctx context.Context, cfg Settings, m *agent.Meter, root string) (*ec2Edge, error) {
	if cfg.Cloud == cloudNone {
		return nil, nil
	}
	e := newEC2Edge(cfg, m)
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, err := e.identity(ctx)
	isEC2, known := firmware(root)
	switch {
	case err == nil || cfg.Cloud == cloudEC2 || isEC2:
		return e, err
	case known:
		return nil, nil
	}
	// The firmware names no vendor. The metadata service may start after the agent,
	// and an instance that is taken for a machine without a cloud would be powered
	// off.
	return e, fmt.Errorf("cannot determine whether this is an EC2 instance (outside a cloud, set --cloud none): %w", err)
}

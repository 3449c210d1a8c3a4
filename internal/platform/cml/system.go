package cml

import (
	"context"
	"errors"
	"fmt"
	"net/http"
)

// Information is CML's description of itself, available without authentication.
type Information struct {
	Version string `json:"version"`
	// Ready reports whether at least one compute can start nodes.
	Ready bool `json:"ready"`
	// Offset is the offset of the host's clock relative to ours; positive if it
	// is ahead.
	Offset Offset `json:"-"`
}

// Information reads version and readiness.
func (c *Client) Information(ctx context.Context) (Information, error) {
	k := call{op: "read system information", method: http.MethodGet, path: "/system_information", open: true}
	var v struct {
		Version *string `json:"version"`
		Ready   *bool   `json:"ready"`
	}
	_, offset, err := c.fetch(ctx, k, &v)
	if err != nil {
		return Information{}, err
	}
	if v.Version == nil || v.Ready == nil {
		return Information{}, &Error{Op: k.op, Host: c.host, Kind: ErrBadAnswer, Err: errors.New("version or ready is missing")}
	}
	return Information{Version: *v.Version, Ready: *v.Ready, Offset: offset}, nil
}

// Stats is the load of a host and its computes. A nil pointer means that CML did
// not report the value.
type Stats struct {
	Computes map[string]Compute `json:"computes"`
	All      Load               `json:"all"`
}

// Compute is one machine of a CML cluster.
type Compute struct {
	Hostname     string `json:"hostname"`
	IsController bool   `json:"is_controller"`
	Stats        struct {
		Load
		DomInfo *DomInfo `json:"dominfo"`
	} `json:"stats"`
}

// Load is the use of CPU, memory and disk; sizes are in bytes.
type Load struct {
	CPU struct {
		Count   *float64 `json:"count"`
		Percent *float64 `json:"percent"`
	} `json:"cpu"`
	Memory Usage `json:"memory"`
	Disk   Usage `json:"disk"`
}

// Usage is a used part of a whole, in bytes.
type Usage struct {
	Used  *float64 `json:"used"`
	Free  *float64 `json:"free"`
	Total *float64 `json:"total"`
}

// Percent returns the used part in percent. ok is false if it is unknown.
func (u Usage) Percent() (float64, bool) {
	if u.Used == nil || u.Total == nil || *u.Total <= 0 || *u.Used < 0 || *u.Used > *u.Total {
		return 0, false
	}
	return 100 * *u.Used / *u.Total, true
}

// DomInfo counts the virtual machines of a compute.
type DomInfo struct {
	TotalNodes   *int `json:"total_nodes"`
	RunningNodes *int `json:"running_nodes"`
}

// RunningNodes returns the number of running nodes on all computes. ok is false
// unless every compute reports its number.
func (s Stats) RunningNodes() (n int, ok bool) {
	for _, c := range s.Computes {
		d := c.Stats.DomInfo
		if d == nil || d.RunningNodes == nil || *d.RunningNodes < 0 {
			return 0, false
		}
		n += *d.RunningNodes
	}
	return n, len(s.Computes) > 0
}

// Stats reads the load of the host.
func (c *Client) Stats(ctx context.Context) (Stats, error) {
	var v Stats
	k := call{op: "read system stats", method: http.MethodGet, path: "/system_stats"}
	_, _, err := c.fetch(ctx, k, &v)
	return v, err
}

// Notice is a message that CML's own user interface shows to its users.
type Notice struct {
	ID      string `json:"id,omitempty"`
	Level   string `json:"level"` // INFO, SUCCESS, WARNING or ERROR
	Label   string `json:"label"`
	Content string `json:"content"`
	Enabled bool   `json:"enabled"`
	// Groups are the groups whose members see the notice; nil means everyone.
	Groups []string `json:"groups"`
}

// Notices lists all notices, including those that are not shown.
func (c *Client) Notices(ctx context.Context) ([]Notice, error) {
	var v []Notice
	_, _, err := c.fetch(ctx, call{op: "list system notices", method: http.MethodGet, path: "/system/notices"}, &v)
	return v, err
}

// PostNotice creates a notice and returns its ID.
func (c *Client) PostNotice(ctx context.Context, n Notice) (string, error) {
	k := call{op: "post system notice", method: http.MethodPost, path: "/system/notices", body: n}
	var v struct {
		ID string `json:"id"`
	}
	if _, _, err := c.fetch(ctx, k, &v); err != nil {
		return "", err
	}
	if err := checkID(v.ID); err != nil {
		return "", &Error{Op: k.op, Host: c.host, Kind: ErrBadAnswer, Err: err}
	}
	return v.ID, nil
}

// DeleteNotice deletes a notice. Deleting a missing notice is not an error.
func (c *Client) DeleteNotice(ctx context.Context, id string) error {
	if err := checkID(id); err != nil {
		return fmt.Errorf("cannot delete system notice of CML at %s: %w", c.host, err)
	}
	_, _, err := c.fetch(ctx, call{op: "delete system notice", method: http.MethodDelete, path: "/system/notices/" + id}, nil)
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	return err
}

// checkID returns an error unless id can be used in a path: only letters, digits,
// '-' and '_'.
func checkID(id string) error {
	if id == "" || len(id) > 64 {
		return fmt.Errorf("id of %d bytes", len(id))
	}
	for _, c := range []byte(id) {
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_') {
			return fmt.Errorf("ID %q contains an invalid byte", id)
		}
	}
	return nil
}

package cml

import (
	"context"
	"errors"
	"fmt"
	"net/http"
)

// maxLabs bounds the labs of one host that are read.
const maxLabs = 2000

// The states of a lab.
const (
	LabDefined = "DEFINED_ON_CORE"
	LabStopped = "STOPPED"
	LabStarted = "STARTED"
)

// Lab is a topology of one user.
type Lab struct {
	ID            string `json:"id"`
	Title         string `json:"lab_title"`
	OwnerUsername string `json:"owner_username"`
	State         string `json:"state"`
	NodeCount     int    `json:"node_count"`
}

// LabCounts summarizes the labs of a host.
type LabCounts struct {
	Labs    int `json:"labs"`
	Started int `json:"started"` // labs in state STARTED
	Nodes   int `json:"nodes"`   // nodes defined in all labs
}

// Labs lists the ids of all users' labs.
func (c *Client) Labs(ctx context.Context) ([]string, error) {
	k := call{op: "list labs", method: http.MethodGet, path: "/labs?show_all=true"}
	var ids []string
	if _, _, err := c.fetch(ctx, k, &ids); err != nil {
		return nil, err
	}
	bad := func(err error) error { return &Error{Op: k.op, Host: c.host, Kind: ErrBadAnswer, Err: err} }
	if len(ids) > maxLabs {
		return nil, bad(fmt.Errorf("the answer lists %d labs, the limit is %d", len(ids), maxLabs))
	}
	for _, id := range ids {
		if err := checkID(id); err != nil {
			return nil, bad(err)
		}
	}
	return ids, nil
}

// Lab reads one lab.
func (c *Client) Lab(ctx context.Context, id string) (Lab, error) {
	if err := checkID(id); err != nil {
		return Lab{}, fmt.Errorf("cannot read lab of CML at %s: %w", c.host, err)
	}
	k := call{op: "read lab " + id, method: http.MethodGet, path: "/labs/" + id}
	var v Lab
	if _, _, err := c.fetch(ctx, k, &v); err != nil {
		return Lab{}, err
	}
	if v.State == "" || v.NodeCount < 0 {
		return Lab{}, &Error{Op: k.op, Host: c.host, Kind: ErrBadAnswer, Err: errors.New("state or node_count is missing or impossible")}
	}
	return v, nil
}

// LabState reads the state of one lab.
func (c *Client) LabState(ctx context.Context, id string) (string, error) {
	if err := checkID(id); err != nil {
		return "", fmt.Errorf("cannot read lab state of CML at %s: %w", c.host, err)
	}
	var v string
	k := call{op: "read state of lab " + id, method: http.MethodGet, path: "/labs/" + id + "/state"}
	if _, _, err := c.fetch(ctx, k, &v); err != nil {
		return "", err
	}
	return v, nil
}

// CountLabs reads every lab, one after the other. A lab that is deleted in the
// meantime is not counted. Any other failure is returned and the counts are then
// unknown. The account must be an administrator, because CML lists only its own
// labs to others; if it is not, the error is an ErrUnauthorized.
func (c *Client) CountLabs(ctx context.Context) (LabCounts, error) {
	ids, err := c.Labs(ctx)
	if err != nil {
		return LabCounts{}, err
	}
	if err := c.seesAllLabs(ctx); err != nil {
		return LabCounts{}, err
	}
	var n LabCounts
	for _, id := range ids {
		lab, err := c.Lab(ctx, id)
		switch {
		case errors.Is(err, ErrNotFound):
			continue
		case err != nil:
			return LabCounts{}, err
		}
		n.Labs++
		n.Nodes += lab.NodeCount
		if lab.State == LabStarted {
			n.Started++
		}
	}
	return n, nil
}

// seesAllLabs returns an error unless the account is an administrator. It asks
// once per session, because CML ends the sessions of an account whose role
// changes.
func (c *Client) seesAllLabs(ctx context.Context) error {
	c.mu.Lock()
	token := c.token
	known := token != "" && c.adminToken == token
	c.mu.Unlock()
	if known {
		return nil
	}
	id, err := c.Identity(ctx)
	if err != nil {
		return err
	}
	if !id.Admin {
		return &Error{Op: "list all labs", Host: c.host, Kind: ErrUnauthorized, Err: fmt.Errorf("account %q is not an administrator, so CML lists only its own labs", id.Username)}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.adminToken = token
	return nil
}

package cmlconsole

import (
	"context"
	"errors"
	"fmt"
	"time"

	"lull/internal/fleet/worker"
	"lull/internal/platform/cml"
)

// probeTimeout is the time limit of each call of a probe.
const probeTimeout = 4 * time.Second

// Probe reports whether a CML answers at the endpoint of w. A CML that refuses the
// credentials or whose certificate cannot be verified counts: judged by CPU load
// alone, it would be paused while in use. If certificates are not verified, only the
// version is requested and no credentials are sent.
func (c *Consoles) Probe(ctx context.Context, w worker.Worker) (found bool, detail string) {
	cfg, err := c.config(w)
	if err != nil {
		return false, err.Error()
	}
	cfg.Timeout = probeTimeout
	client, err := cml.New(cfg)
	if err != nil {
		return false, err.Error()
	}
	defer client.Close()
	info, err := client.Information(ctx)
	if err == nil {
		detail = fmt.Sprintf("CML %s answers at %s", info.Version, w.HTTPSEndpoint)
		if _, err := client.Identity(ctx); err != nil && !errors.Is(err, cml.ErrNotFound) {
			detail += fmt.Sprintf(", but cannot be read: %v; set --cml-username and --cml-password, or choose --source", err)
		}
		return true, detail
	}
	cfg.TLS, cfg.Username, cfg.Password = cml.TLS{Insecure: true}, "", ""
	open, openErr := cml.New(cfg)
	if openErr != nil {
		return false, openErr.Error()
	}
	defer open.Close()
	info, openErr = open.Information(ctx)
	if openErr != nil {
		return false, openErr.Error()
	}
	return true, fmt.Sprintf("CML %s answers at %s, but its certificate cannot be verified: %v; set --tls-pin or --tls-ca, or choose --source", info.Version, w.HTTPSEndpoint, err)
}

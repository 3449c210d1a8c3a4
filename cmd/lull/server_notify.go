package main

import (
	"fmt"
	"log/slog"

	"lull/internal/fleet"
	"lull/internal/fleet/sealed"
	"lull/internal/lib/outward"
	"lull/internal/notify"
)

// newNotifier returns the component that delivers notifications. It connects only to
// public addresses, and to those that the process's settings allow. The settings in
// the store cannot allow more.
func (c *cli) newNotifier(cfg serverConfig, f *fleet.Fleet, seal *sealed.Sealer, log *slog.Logger) (*notify.Notifier, error) {
	allow, err := outward.ParseAllow(fields(cfg.NotifyAllow))
	if err != nil {
		return nil, fmt.Errorf("cannot use notify-allow: %w", err)
	}
	dial := outward.Dialer{Allow: allow}
	return notify.New(notify.Config{Fleet: f, Secret: secrets(seal, c.Getenv), Dial: dial.DialContext, Version: version, Log: log.With("part", "notifier")})
}

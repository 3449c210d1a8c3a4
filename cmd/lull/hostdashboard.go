//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/user"
	"sync"
	"time"

	"lull/internal/fleet"
	"lull/internal/host"
	"lull/internal/host/report"
	"lull/internal/lib/task"
	"lull/internal/protocol/hostctl"
	"lull/internal/server"
	"lull/internal/server/access"
	"lull/internal/server/web"
	"lull/internal/store/mem"
)

const (
	openAddress = "127.0.0.1:7071" // the dashboard's address with lull host --open
	openTTL     = 5 * time.Minute  // lifetime of a sign-in link

	// dashboardStore is the maximum size of the dashboard's in-memory store, which
	// holds sessions and the record of commands.
	dashboardStore = 16 << 20
)

// dashboard is a host's own dashboard: a server for this host alone, with its state
// in memory, so that sessions end with the daemon. The host reports to it as to any
// server.
type dashboard struct {
	api     *server.Server
	tokens  *access.Tokens
	reports *report.Reporter
	base    string

	mu    sync.Mutex
	users map[string]string // ID of the token from which a user's links are made, by user
}

func newDashboard(cfg hostConfig, l net.Listener, h *host.Host, commands *report.Commands, faults []string, log *slog.Logger) (*dashboard, error) {
	name := cfg.Target.Machine
	if name == "" {
		var err error
		if name, err = os.Hostname(); err != nil {
			return nil, err
		}
	}
	db := mem.New(mem.Options{QuotaBytes: dashboardStore}).Client()
	f, err := fleet.New(fleet.Options{Store: db, ID: name})
	if err != nil {
		return nil, err
	}
	at := serverConfig{TLSCert: cfg.TLSCert}
	d := &dashboard{tokens: access.New(db), base: at.base(l), users: map[string]string{}}
	local := &server.Local{Host: name, Halted: h.Halted, Halt: h.Halt}
	d.api, err = server.New(server.Options{Fleet: f, Tokens: d.tokens, Version: version, BuildDate: buildDate, Web: web.Handler(), Local: local, Name: name, Log: log.With("part", "dashboard")})
	if err != nil {
		return nil, err
	}
	d.reports = &report.Reporter{Host: h, Server: d.api, Where: "the dashboard", Name: name, Version: version, BuildDate: buildDate, Every: 15 * time.Second,
		Faults: faults, Log: log.With("part", "dashboard"), Commands: commands, Via: "dashboard"}
	return d, nil
}

func (d *dashboard) tasks() []task.Task {
	return []task.Task{d.api, task.Loop("reports to the dashboard", d.reports.Run)}
}

// link returns a link that signs a user in once.
func (d *dashboard) link(ctx context.Context, user string) (hostctl.Link, error) {
	if d == nil {
		return hostctl.Link{}, errors.New("this host serves no dashboard: start it with --listen " + openAddress)
	}
	select {
	case <-d.api.Ready():
	case <-ctx.Done():
		return hostctl.Link{}, ctx.Err()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	user = cmp.Or(user, "local")
	if d.users[user] == "" {
		t, _, err := d.tokens.Create(ctx, access.Wanted{Name: user, Role: access.Operator, By: "lull host"})
		if err != nil {
			return hostctl.Link{}, err
		}
		d.users[user] = t.ID
	}
	until := time.Now().Add(openTTL).UTC().Round(time.Second)
	secret, err := d.tokens.Link(ctx, d.users[user], openTTL)
	return hostctl.Link{URL: d.base + server.SignInPath + "#" + secret, ExpiresAt: until}, err
}

// localUser returns the name of the user who runs this process.
func localUser() string {
	if u, err := user.Current(); err == nil {
		return u.Username
	}
	return ""
}

package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/savings"
	"lull/internal/fleet"
	"lull/internal/fleet/channel"
	"lull/internal/platform/ec2"
	"lull/internal/protocol/control"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// Thresholds of the server's doctor.
const (
	oldPrices  = 400 * 24 * time.Hour // AWS changes prices about once a year
	certEnds   = 14 * 24 * time.Hour
	clockSlack = 30 * time.Second // AWS rejects calls if the clock is 5 minutes off
)

func (c *cli) serverDoctor() *cobra.Command {
	var file string
	cmd := &cobra.Command{Use: "doctor", Short: "Check a server's settings, files and permissions", Example: "  lull server doctor --config server.yaml", Args: term.Args(cobra.NoArgs),
		Long: `Check everything that a server with these settings needs: its files, the store, the
listen address and certificate, credentials and permissions in each region, the clock
and the price table. With LULL_SERVER and LULL_TOKEN, also check the running server's
stored settings and notifications. Nothing is changed; permissions are tested with
EC2 dry runs.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := resolveServer(c.Getenv, file, cmd.Flags())
			if err != nil {
				return term.Usage(err)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 2*time.Minute)
			defer cancel()
			d := &serverCheck{c: c, cfg: cfg}
			d.look(ctx)
			return c.ShowFindings(d.Findings)
		}}
	cmd.Flags().StringVar(&file, "config", "", "YAML config file")
	bindServerFlags(cmd.Flags(), c.Getenv)
	return cmd
}

// serverCheck collects the findings about a server with cfg on this machine.
type serverCheck struct {
	c   *cli
	cfg serverConfig
	term.Findings
}

func (d *serverCheck) look(ctx context.Context) {
	d.files()
	d.address()
	d.prices()
	at, running := d.server(ctx)
	d.store(ctx, running)
	d.cloud(ctx, at)
}

func (d *serverCheck) files() {
	info, err := os.Stat(d.cfg.Data)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		d.Add("data directory", true, d.cfg.Data+" is created at the first start", "")
	case err != nil:
		d.Add("data directory", false, err.Error(), "make it readable for this user")
	case info.Mode().Perm()&0o077 != 0:
		d.Add("data directory", false, fmt.Sprintf("%s has mode %o: other users can read its contents", d.cfg.Data, info.Mode().Perm()), "chmod 700 "+d.cfg.Data)
	default:
		d.Add("data directory", true, d.cfg.Data, "")
	}
	key := d.cfg.SealKey
	if key == "" {
		key = filepath.Join(d.cfg.Data, "seal.key")
	}
	info, err = os.Stat(key)
	switch {
	case d.cfg.SealKey == "" && d.cfg.Etcd != "":
		d.Add("sealing key", false, "none: secrets cannot be stored, and links in warnings cannot be signed", "use the same --seal-key on every server: head -c 32 /dev/urandom > FILE")
	case errors.Is(err, fs.ErrNotExist) && d.cfg.SealKey == "":
		d.Add("sealing key", true, key+" is created at the first start", "")
	case err != nil:
		d.Add("sealing key", false, err.Error(), "put a file of 32 bytes there, readable by the server only")
	case info.Size() != 32 || info.Mode().Perm()&0o077 != 0:
		d.Add("sealing key", false, fmt.Sprintf("%s has %d bytes and mode %o", key, info.Size(), info.Mode().Perm()), "it must have 32 bytes and mode 600")
	default:
		d.Add("sealing key", true, key+"; back it up separately, because lull's backups do not contain it", "")
	}
}

func (d *serverCheck) address() {
	host, _, err := net.SplitHostPort(d.cfg.Listen)
	ip := net.ParseIP(host)
	local := host == "localhost" || ip != nil && ip.IsLoopback()
	switch {
	case err != nil:
		d.Add("address", false, err.Error(), "want --listen HOST:PORT")
	case d.cfg.TLSCert == "" && local:
		d.Add("address", true, d.cfg.Listen+", loopback only, without TLS", "")
	case d.cfg.TLSCert == "":
		d.Add("address", false, d.cfg.Listen+" without TLS: tokens can be read in transit", "give --tls-cert and --tls-key, or put a TLS proxy in front")
	default:
		d.certificate()
	}
}

func (d *serverCheck) certificate() {
	pair, err := tls.LoadX509KeyPair(d.cfg.TLSCert, d.cfg.TLSKey)
	if err == nil {
		pair.Leaf, err = x509.ParseCertificate(pair.Certificate[0])
	}
	if err != nil {
		d.Add("certificate", false, err.Error(), "give a certificate and its key in PEM")
		return
	}
	left := time.Until(pair.Leaf.NotAfter)
	d.Add("certificate", left > certEnds && time.Now().After(pair.Leaf.NotBefore), fmt.Sprintf("%s, for %v, from %s until %s", d.cfg.Listen, pair.Leaf.DNSNames,
		pair.Leaf.NotBefore.Format(time.DateOnly), pair.Leaf.NotAfter.Format(time.DateOnly)), "renew it; it is reloaded on change")
}

func (d *serverCheck) prices() {
	p, err := d.cfg.prices()
	if err == nil && p == nil {
		p, err = savings.Published()
	}
	if err != nil {
		d.Add("prices", false, err.Error(), "fix the file given with --prices")
		return
	}
	var newest time.Time
	for _, v := range p {
		if v.AsOf.After(newest) {
			newest = v.AsOf
		}
	}
	d.Add("prices", true, fmt.Sprintf("%d, as of %s", len(p), newest.Format(time.DateOnly)), "")
	if time.Since(newest) > oldPrices { // old prices are no fault
		d.Hint("the price table is old, and savings are calculated from it; give a newer one with --prices")
	}
}

// places are the regions in the settings, the default one first.
type places []string

func placesOf(first string, configured []string) places {
	out := places{first}
	for _, r := range slices.Sorted(slices.Values(configured)) {
		if r != first {
			out = append(out, r)
		}
	}
	return out
}

// server checks the running server, and returns its regions. If it does not answer,
// the regions are those in cfg.
func (d *serverCheck) server(ctx context.Context) (at places, running bool) {
	db := mem.New(mem.Options{}).Client()
	defer db.Close()
	f, err := fleet.New(fleet.Options{Store: db, ID: "doctor", Flags: d.cfg.flags, Env: d.cfg.env, File: d.cfg.file})
	if err != nil {
		d.Add("settings", false, err.Error(), "fix the listed faults")
		return nil, false
	}
	s := f.Settings()
	at = placesOf(s.AWSDefaultRegion, slices.Collect(maps.Keys(s.AWSRegionConfigs)))
	cl, err := d.c.ServerClient()
	if err != nil {
		d.Add("server", true, "not checked: "+err.Error(), "")
		return at, false
	}
	stored, err := control.Read[control.Settings](ctx, cl, "/settings")
	if err != nil {
		d.Add("server", false, err.Error(), "start it, and set LULL_SERVER and LULL_TOKEN (lull server --new-admin-token creates one) to include it")
		return at, false
	}
	d.Add("server", true, d.c.ServerURL()+" answers, and the token is valid", "")
	channels, err := control.All[channel.Delivery](ctx, cl, "/api/v1/notifications/channels", nil)
	if err != nil {
		d.Add("notifications", false, err.Error(), "use a token with the role operator or admin")
	}
	for _, x := range channels {
		ok := x.FailingSince == nil && x.Dead == 0
		found := fmt.Sprintf("%s: %d delivered, %d waiting, %d dead", x.Type, x.Delivered, x.Pending, x.Dead)
		if x.FailingSince != nil {
			found += "; failing since " + term.Time(*x.FailingSince) + ": " + x.LastError
		}
		d.Add("notifications to "+x.Channel, ok, found, "lull notify test "+x.Channel+"; then lull notify dead, retry or drop")
	}
	first, configured := s.AWSDefaultRegion, []string{}
	for _, v := range stored.Items {
		switch x := v.Value.(type) {
		case string:
			if v.Key == "aws_default_region" {
				first = x
			}
		case map[string]any:
			if v.Key == "aws_region_configs" {
				configured = slices.Collect(maps.Keys(x))
			}
		}
	}
	return placesOf(first, configured), true
}

func (d *serverCheck) store(ctx context.Context, running bool) {
	switch {
	case d.cfg.Etcd == "" && running:
		d.Add("store", true, "in "+d.cfg.Data+", open in the running server, which answers from it", "")
		return
	case d.cfg.Etcd == "":
		if _, err := os.Stat(d.cfg.Data); errors.Is(err, fs.ErrNotExist) {
			d.Add("store", true, "empty; the store is created at the first start", "")
			return
		}
	}
	open, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	db, err := d.cfg.open(open, d.c.logger(d.cfg))
	if err != nil {
		d.Add("store", false, err.Error(), "a running server has opened its data directory: set LULL_SERVER and LULL_TOKEN to check that server; an etcd cluster must have quorum and accept this user")
		return
	}
	defer func() {
		if err := db.Close(); err != nil {
			d.Add("store", false, err.Error(), "see the cause")
		}
	}()
	began := time.Now()
	page, err := db.Range(open, store.Query{Keys: store.Prefix("workers/"), Limit: 1})
	if err != nil {
		d.Add("store", false, err.Error(), "free space or raise the quota, then disarm the alarm: etcdctl alarm disarm")
		return
	}
	d.Add("store", true, fmt.Sprintf("answers in %s, at revision %d", term.Span(time.Since(began)), page.Revision), "")
}

// cloud checks each region: the credentials, the clock, and a dry run of what the
// server would do to an instance.
func (d *serverCheck) cloud(ctx context.Context, regions places) {
	accounts, err := accountsOf(d.cfg.Accounts)
	if err != nil {
		d.Add("accounts", false, err.Error(), "want --aws-accounts NAME=ROLE-ARN,...")
		return
	}
	limits, err := d.cfg.limits()
	if err != nil {
		d.Add("rates", false, err.Error(), "fix the rate")
		return
	}
	set := &ec2.Set{Accounts: accounts, Limits: limits}
	for _, account := range slices.Sorted(maps.Keys(accounts)) {
		for _, region := range regions {
			d.region(ctx, set, account, region)
		}
	}
	if len(regions) > 0 {
		d.clock(ctx, regions[0])
	}
}

func (d *serverCheck) region(ctx context.Context, set *ec2.Set, account, region string) {
	name := region
	if account != "" {
		name = account + " " + region
	}
	call, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	cl, err := set.Client(call, account, region)
	if err != nil {
		d.Add("region "+name, false, err.Error(), "provide credentials: AWS_PROFILE, AWS_ACCESS_KEY_ID, or the machine's role")
		return
	}
	states, err := cl.States(call)
	if err != nil {
		d.Add("region "+name, false, err.Error(), "allow the server's role what etc/examples/cloudformation.yaml lists, and make EC2 reachable from this network")
		return
	}
	d.Add("region "+name, true, fmt.Sprintf("%d instances seen", len(states)), "")
	ids := slices.Sorted(maps.Keys(states))
	if len(ids) == 0 {
		d.Add("rights in "+name, true, "not tested: no EC2 instance to test with", "")
		return
	}
	for _, op := range []string{"StopInstances", "StartInstances", "CreateTags"} {
		err := cl.DryRun(call, op, ids[0])
		switch ec2.KindOf(err) {
		case "":
			d.Add(op+" in "+name, err == nil, "tested with "+ids[0]+", as a dry run", "see the cause: "+fmt.Sprint(err))
		case ec2.Unauthorized:
			d.Add(op+" in "+name, false, err.Error(), "allow it for the server's role, at least for instances with the tag managed-by")
		default:
			d.Add(op+" in "+name, true, "allowed; of "+ids[0]+" EC2 says: "+ec2.CodeOf(err), "")
		}
	}
}

// clock compares this machine's clock with AWS's, because AWS rejects calls if the
// clock is five minutes off.
func (d *serverCheck) clock(ctx context.Context, region string) {
	endpoint := d.c.Getenv("AWS_ENDPOINT_URL")
	if endpoint == "" {
		endpoint = "https://ec2." + region + ".amazonaws.com"
	}
	call, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(call, http.MethodHead, endpoint, nil)
	if err != nil {
		d.Add("clock", false, err.Error(), "correct AWS_ENDPOINT_URL")
		return
	}
	began := time.Now()
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		d.Add("clock", false, "not compared: "+err.Error(), "make EC2 reachable from this network")
		return
	}
	res.Body.Close()
	at, err := http.ParseTime(res.Header.Get("Date"))
	if err != nil {
		d.Add("clock", true, "not compared: the answer has no date", "")
		return
	}
	off := began.Sub(at).Round(time.Second)
	d.Add("clock", off.Abs() < clockSlack, fmt.Sprintf("%s from that of %s", off, endpoint), "set the clock: systemctl enable --now systemd-timesyncd")
}

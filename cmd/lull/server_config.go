package main

import (
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lull/internal/cli/client"
	"lull/internal/cli/options"
	"lull/internal/cli/reporting"
	"lull/internal/core/savings"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/lib/outward"
	"lull/internal/platform/ec2"
	"lull/internal/platform/oidc"
	"lull/internal/server"
)

// serverConfig contains the settings of the lull server process. The settings
// of the fleet are in settings.Settings.
type serverConfig struct {
	Data, Listen, Role                            string
	TLSCert, TLSKey                               string
	Insecure, Shadow                              bool
	Etcd, EtcdCA, EtcdCert, EtcdKey, EtcdUser     string
	EtcdPasswordFile, FleetID, SealKey, TokenFile string
	LogLevel, CMLPort, Owners, Accounts           string
	Advertise, PeerCA                             string
	NotifyAllow, ReadRate, WriteRate              string
	EvidenceDays, EvidenceMiB, Prices             string
	NewToken                                      bool
	Issuer, ClientID, ClientSecretFile            string // of the OIDC issuer
	RoleClaim, Roles, PublicURL                   string

	flags, env, file settings.Layer
}

var serverOption = options.New[serverConfig]

var serverOptions = []options.Option[serverConfig]{
	serverOption("data", "LULL_SERVER_DATA", "path", "directory of the store, the sealing key and archives; used by one server at a time", func(c *serverConfig) any { return &c.Data }),
	serverOption("listen", "LULL_SERVER_LISTEN", "host:port", "listen address of the API", func(c *serverConfig) any { return &c.Listen }),
	serverOption("role", "LULL_SERVER_ROLE", "all|api|controller", "role of this process; all roles except all need --etcd", func(c *serverConfig) any { return &c.Role }),
	serverOption("shadow", "LULL_SERVER_SHADOW", "bool", "dry run: decide and record, but take no action", func(c *serverConfig) any { return &c.Shadow }),
	serverOption("tls-cert", "LULL_SERVER_TLS_CERT", "path", "TLS certificate of the API in PEM, reloaded on change", func(c *serverConfig) any { return &c.TLSCert }),
	serverOption("tls-key", "LULL_SERVER_TLS_KEY", "path", "private key of the certificate", func(c *serverConfig) any { return &c.TLSKey }),
	serverOption("insecure", "LULL_SERVER_INSECURE", "bool", "allow listening on a non-loopback address without TLS", func(c *serverConfig) any { return &c.Insecure }),
	serverOption("etcd", "LULL_SERVER_ETCD", "URL,...", "URLs of an existing etcd cluster; empty keeps the state in the data directory", func(c *serverConfig) any { return &c.Etcd }),
	serverOption("etcd-ca", "LULL_SERVER_ETCD_CA", "path", "CA certificate of the etcd cluster in PEM", func(c *serverConfig) any { return &c.EtcdCA }),
	serverOption("etcd-cert", "LULL_SERVER_ETCD_CERT", "path", "client certificate for the etcd cluster in PEM", func(c *serverConfig) any { return &c.EtcdCert }),
	serverOption("etcd-key", "LULL_SERVER_ETCD_KEY", "path", "private key of the certificate", func(c *serverConfig) any { return &c.EtcdKey }),
	serverOption("etcd-user", "LULL_SERVER_ETCD_USER", "name", "etcd user", func(c *serverConfig) any { return &c.EtcdUser }),
	serverOption("etcd-password-file", "LULL_SERVER_ETCD_PASSWORD_FILE", "path", "file with the etcd user's password", func(c *serverConfig) any { return &c.EtcdPasswordFile }),
	serverOption("fleet-id", "LULL_SERVER_FLEET_ID", "name", "value of the tag managed-by (default: the stored one, or a new one)", func(c *serverConfig) any { return &c.FleetID }),
	serverOption("seal-key", "LULL_SERVER_SEAL_KEY", "path", "32-byte key that encrypts secrets (default: seal.key in the data directory, created if missing)", func(c *serverConfig) any { return &c.SealKey }),
	serverOption("admin-token-file", "LULL_SERVER_ADMIN_TOKEN_FILE", "path", "also write the first admin token to this file (mode 0600)", func(c *serverConfig) any { return &c.TokenFile }),
	serverOption("new-admin-token", "LULL_SERVER_NEW_ADMIN_TOKEN", "bool", "create and print a new admin token, for example after losing the first", func(c *serverConfig) any { return &c.NewToken }),
	serverOption("cml-port", "LULL_SERVER_CML_PORT", "port", "port of CML on the workers", func(c *serverConfig) any { return &c.CMLPort }),
	serverOption("image-owners", "LULL_SERVER_IMAGE_OWNERS", "account,...", "owners of the images that templates may use; empty is self", func(c *serverConfig) any { return &c.Owners }),
	serverOption("aws-accounts", "LULL_SERVER_AWS_ACCOUNTS", "NAME=ROLE-ARN,...", "roles to assume in other accounts", func(c *serverConfig) any { return &c.Accounts }),
	serverOption("aws-read-rate", "LULL_SERVER_AWS_READ_RATE", "calls a second", "rate limit of EC2 describe calls per account and region; AWS's default quota is 20", func(c *serverConfig) any { return &c.ReadRate }),
	serverOption("aws-write-rate", "LULL_SERVER_AWS_WRITE_RATE", "calls a second", "rate limit of launches, starts, stops and terminations per account and region; AWS's default quota is 2", func(c *serverConfig) any { return &c.WriteRate }),
	serverOption("advertise", "LULL_SERVER_ADVERTISE", "URL", "URL at which other servers of the fleet read this server's live readings; empty disables this", func(c *serverConfig) any { return &c.Advertise }),
	serverOption("peer-ca", "LULL_SERVER_PEER_CA", "path", "CA certificates in PEM for other servers of the fleet, whose certificates name their advertised hosts (default: the system's)", func(c *serverConfig) any { return &c.PeerCA }),
	serverOption("notify-allow", "LULL_SERVER_NOTIFY_ALLOW", "NETWORK,...", "networks besides the public internet that notifications may reach, such as 10.0.0.0/8 or 127.0.0.1", func(c *serverConfig) any { return &c.NotifyAllow }),
	serverOption("oidc-issuer", "LULL_SERVER_OIDC_ISSUER", "URL", "OIDC issuer whose ID tokens are accepted; empty disables OIDC", func(c *serverConfig) any { return &c.Issuer }),
	serverOption("oidc-client-id", "LULL_SERVER_OIDC_CLIENT_ID", "text", "client ID of this server at the issuer, the required audience of tokens", func(c *serverConfig) any { return &c.ClientID }),
	serverOption("oidc-client-secret-file", "LULL_SERVER_OIDC_CLIENT_SECRET_FILE", "path", "file with the client secret; empty for a public client, which lull login needs", func(c *serverConfig) any { return &c.ClientSecretFile }),
	serverOption("oidc-role-claim", "LULL_SERVER_OIDC_ROLE_CLAIM", "text", "claim that determines the role; dots select nested values", func(c *serverConfig) any { return &c.RoleClaim }),
	serverOption("oidc-roles", "LULL_SERVER_OIDC_ROLES", "VALUE=ROLE,...", "role for each value of the claim; * matches every user of the issuer", func(c *serverConfig) any { return &c.Roles }),
	serverOption("public-url", "LULL_SERVER_PUBLIC_URL", "URL", "URL at which browsers reach this server, for redirects from the issuer (default: the URL of the request)", func(c *serverConfig) any { return &c.PublicURL }),
	serverOption("evidence-days", "LULL_SERVER_EVIDENCE_DAYS", "days", "retention of readings and verdicts of checks", func(c *serverConfig) any { return &c.EvidenceDays }),
	serverOption("evidence-max-mib", "LULL_SERVER_EVIDENCE_MAX_MIB", "MiB", "size limit of readings and verdicts in the data directory; the oldest are removed first", func(c *serverConfig) any { return &c.EvidenceMiB }),
	serverOption("prices", "LULL_SERVER_PRICES", "path", "CSV price table to use instead of the built-in one", func(c *serverConfig) any { return &c.Prices }),
	serverOption("log-level", "LULL_SERVER_LOG_LEVEL", "debug|info|warn|error", "minimum level logged to standard error", func(c *serverConfig) any { return &c.LogLevel }),
}

func defaultServerConfig(getenv func(string) string) serverConfig {
	return serverConfig{Data: client.DefaultData(getenv, "server"), Listen: "127.0.0.1:7070", Role: "all", LogLevel: "info", CMLPort: "443",
		ReadRate: "10", WriteRate: "2", EvidenceDays: "30", EvidenceMiB: "2048",
		RoleClaim: "groups", Roles: "admin=admin,operator=operator,viewer=viewer"}
}

func bindServerFlags(f *pflag.FlagSet, getenv func(string) string) {
	options.Bind(f, defaultServerConfig(getenv), serverOptions)
	for _, s := range settings.Fields() {
		f.String(flagOf(s), s.Default, fmt.Sprintf("%s ($%s)", s.Doc, s.Env))
	}
}

func flagOf(f settings.Field) string { return strings.ReplaceAll(f.Key, "_", "-") }

// resolveServer reads the settings from all sources. The error joins every fault,
// each with its flag, variable, or file and line.
func resolveServer(getenv func(string) string, file string, flags *pflag.FlagSet) (serverConfig, []options.Setting, error) {
	cfg := defaultServerConfig(getenv)
	read, err := options.ReadFile(file)
	out, faults := options.Read(&cfg, serverOptions, read, getenv, flags)
	errs := []error{err, faults}
	if err == nil {
		own := func(key string) bool {
			return slices.ContainsFunc(serverOptions, func(o options.Option[serverConfig]) bool { return o.Name == key })
		}
		cfg.file, err = settings.FileLayer(file, read.Data, own)
		errs = append(errs, err)
	}
	cfg.layers(getenv, flags)
	layers := []settings.Layer{cfg.flags, cfg.env, cfg.file}
	_, all, err := settings.Resolve(layers...)
	for _, s := range all {
		from := string(s.Source)
		for _, l := range layers {
			if l.Source == s.Source {
				from = l.Where(s.Field)
			}
		}
		out = append(out, options.Setting{Name: s.Key, Env: s.Env, Unit: s.Unit, Default: s.Default, Value: fmt.Sprint(s.Value), Source: from, Doc: s.Doc})
	}
	return cfg, out, errors.Join(append(errs, err, cfg.validate())...)
}

// layers reads the fleet's settings that flags and environment set.
func (cfg *serverConfig) layers(getenv func(string) string, flags *pflag.FlagSet) {
	cfg.flags = settings.Layer{Source: settings.FromFlag, Values: map[string]any{}}
	cfg.env = settings.Layer{Source: settings.FromEnv, Values: map[string]any{}}
	for _, f := range settings.Fields() {
		if e := getenv(f.Env); e != "" {
			cfg.env.Values[f.Key] = e
		}
		if fl := flags.Lookup(flagOf(f)); fl != nil && fl.Changed {
			cfg.flags.Values[f.Key] = fl.Value.String()
		}
	}
}

// limits returns the rate limits for EC2 calls. A burst is the size of AWS's own
// token buckets or, for a larger quota, two seconds' worth.
func (cfg *serverConfig) limits() (ec2.Limits, error) {
	var l ec2.Limits
	for _, r := range []struct {
		name, text string
		burst      int
		rate       *float64
		to         *int
	}{{"aws-read-rate", cfg.ReadRate, 50, &l.ReadRate, &l.ReadBurst}, {"aws-write-rate", cfg.WriteRate, 5, &l.WriteRate, &l.WriteBurst}} {
		v, err := strconv.ParseFloat(r.text, 64)
		if err != nil || !(v > 0 && v <= 1000) {
			return l, fmt.Errorf("cannot use %s %q: want a number from 0 to 1000", r.name, r.text)
		}
		*r.rate, *r.to = v, max(r.burst, int(2*v))
	}
	return l, nil
}

func (cfg *serverConfig) validate() error {
	var errs []error
	fail := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	if !slices.Contains([]string{"all", "api", "controller"}, cfg.Role) {
		fail("cannot use role %q: want all, api or controller", cfg.Role)
	}
	if cfg.Role != "all" && cfg.Etcd == "" {
		fail("cannot split roles without --etcd: the processes share their state through it")
	}
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, cfg.LogLevel) {
		fail("cannot use log-level %q: want debug, info, warn or error", cfg.LogLevel)
	}
	if n, err := strconv.ParseUint(cfg.CMLPort, 10, 16); err != nil || n == 0 {
		fail("cannot use cml-port %q: not a port", cfg.CMLPort)
	}
	if n, err := strconv.Atoi(cfg.EvidenceDays); err != nil || n < 1 || n > 3650 {
		fail("cannot use evidence-days %q: want 1 to 3650", cfg.EvidenceDays)
	}
	if n, err := strconv.Atoi(cfg.EvidenceMiB); err != nil || n < 1 || n > 1<<20 {
		fail("cannot use evidence-max-mib %q: want 1 to 1048576", cfg.EvidenceMiB)
	}
	if u, err := url.Parse(cfg.Advertise); cfg.Advertise != "" && (err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https") {
		fail("cannot use advertise %q: want http://host:port or https://host:port", cfg.Advertise)
	}
	if _, err := cfg.peerRoots(); err != nil {
		errs = append(errs, err)
	}
	if _, err := cfg.limits(); err != nil {
		errs = append(errs, err)
	}
	if _, err := accountsOf(cfg.Accounts); err != nil {
		errs = append(errs, err)
	}
	if _, err := cfg.identity(); err != nil {
		errs = append(errs, err)
	}
	if (cfg.TLSCert == "") != (cfg.TLSKey == "") {
		fail("cannot use tls-cert without tls-key, or tls-key without tls-cert")
	}
	host, _, err := net.SplitHostPort(cfg.Listen)
	switch {
	case err != nil:
		fail("cannot listen on %q: want host:port", cfg.Listen)
	case cfg.TLSCert == "" && !cfg.Insecure && !reporting.Loopback(host):
		fail("cannot listen on %s without TLS: tokens could be read in transit; give --tls-cert and --tls-key, or --insecure", cfg.Listen)
	}
	if _, err := outward.ParseAllow(fields(cfg.NotifyAllow)); err != nil {
		fail("cannot use notify-allow: %v", err)
	}
	if abs, err := filepath.Abs(cfg.Data); err == nil {
		cfg.Data = abs
	}
	return errors.Join(errs...)
}

// peerRoots returns the CAs of other servers; nil means the system's.
func (cfg *serverConfig) peerRoots() (*x509.CertPool, error) {
	if cfg.PeerCA == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(cfg.PeerCA)
	if err != nil {
		return nil, fmt.Errorf("cannot read peer-ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("cannot use peer-ca %s: it contains no PEM certificate", cfg.PeerCA)
	}
	return pool, nil
}

// configServer returns the verb that prints the effective settings of lull server.
func (c *cli) configServer() *cobra.Command {
	var file string
	cmd := options.Command(&c.Term, "server", "Show the settings of lull server and its fleet", func(flags *pflag.FlagSet) ([]options.Setting, error) {
		_, l, err := resolveServer(c.Getenv, file, flags)
		return l, err
	})
	cmd.Flags().StringVar(&file, "config", "", "YAML config file")
	bindServerFlags(cmd.Flags(), c.Getenv)
	return cmd
}

// identity returns the OIDC issuer that cfg names, or nil.
func (cfg *serverConfig) identity() (server.IdentityProvider, error) {
	if cfg.Issuer == "" {
		return nil, nil
	}
	o := oidc.Config{Issuer: cfg.Issuer, ClientID: cfg.ClientID, RoleClaim: cfg.RoleClaim, Roles: map[string]string{}}
	for part := range strings.SplitSeq(cfg.Roles, ",") {
		value, role, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok || value == "" {
			return nil, fmt.Errorf("cannot use oidc-roles: %q is not VALUE=ROLE", part)
		}
		o.Roles[value] = role
	}
	if cfg.ClientSecretFile != "" {
		b, err := os.ReadFile(cfg.ClientSecretFile)
		if err != nil {
			return nil, fmt.Errorf("cannot read oidc-client-secret-file: %w", err)
		}
		o.ClientSecret = sealed.Plain(strings.TrimSpace(string(b)))
	}
	if u, err := url.Parse(cfg.PublicURL); cfg.PublicURL != "" && (err != nil || u.Host == "" || strings.HasSuffix(cfg.PublicURL, "/")) {
		return nil, fmt.Errorf("cannot use public-url %q: want https://host:port without a trailing slash", cfg.PublicURL)
	}
	p, err := oidc.New(o)
	if err != nil {
		return nil, err
	}
	return p, nil
}

// accountsOf parses NAME=ROLE-ARN,... into accounts by name. It adds the account of
// the standard credential chain under the name "".
func accountsOf(text string) (map[string]ec2.Access, error) {
	out := map[string]ec2.Access{"": {}}
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		name, arn, ok := strings.Cut(part, "=")
		if !ok || name == "" || !strings.HasPrefix(arn, "arn:") {
			return nil, fmt.Errorf("cannot use aws-accounts: %q is not NAME=ROLE-ARN", part)
		}
		out[name] = ec2.Access{RoleARN: arn}
	}
	return out, nil
}

// accountNames returns the names of the accounts, without that of the credentials.
func accountNames(accounts map[string]ec2.Access) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(accounts)), func(name string) bool { return name == "" })
}

// secrets returns a function that resolves or decrypts a sealed.Secret. It reads
// files up to a maximum size.
func secrets(seal *sealed.Sealer, getenv func(string) string) func(sealed.Secret) (sealed.Plain, error) {
	file := func(name string) (sealed.Plain, error) {
		b, err := os.ReadFile(name)
		if err == nil && len(b) > 64<<10 {
			err = fmt.Errorf("%d bytes, the limit is 65536", len(b))
		}
		if err != nil {
			return "", fmt.Errorf("cannot read a secret: %w", err)
		}
		return sealed.Plain(strings.TrimRight(string(b), "\r\n")), nil
	}
	env := func(name string) (sealed.Plain, error) {
		v := getenv(name)
		if v == "" {
			return "", fmt.Errorf("cannot read a secret: the environment has no %s", name)
		}
		return sealed.Plain(v), nil
	}
	return func(s sealed.Secret) (sealed.Plain, error) { return seal.Open(s, file, env) }
}

// prices returns the configured price table, which replaces the published one; nil if
// none is configured.
func (cfg *serverConfig) prices() (savings.Prices, error) {
	if cfg.Prices == "" {
		return nil, nil
	}
	f, err := os.Open(cfg.Prices)
	if err != nil {
		return nil, fmt.Errorf("cannot read the prices: %w", err)
	}
	defer f.Close()
	p, err := savings.Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", cfg.Prices, err)
	}
	return p, nil
}

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/admin"
	"lull/internal/cli/setup"
	"lull/internal/cli/term"
	"lull/internal/fleet"
	"lull/internal/fleet/sealed"
	"lull/internal/lib/task"
	"lull/internal/platform/etcd"
	"lull/internal/server"
	"lull/internal/server/access"
	"lull/internal/server/web"
	"lull/internal/store"
)

func (c *cli) serverCommand() *cobra.Command {
	var file string
	cmd := &cobra.Command{Use: "server", Short: "Run the API, the dashboard and the worker controller", Args: term.Args(cobra.NoArgs),
		Long: `Run the API, the dashboard and the worker controller. The state is kept in --data, or in
an etcd cluster that any number of servers can share. The first start prints an admin
token once. The server listens on loopback unless --listen is given; other addresses
need a TLS certificate.

For environment variables, settings and their sources: lull config server.`,
		Example: "  lull server\n  lull server --listen 0.0.0.0:7070 --tls-cert cert.pem --tls-key key.pem --config server.yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := resolveServer(c.Getenv, file, cmd.Flags())
			if err != nil {
				return term.Usage(err)
			}
			return c.serve(cmd.Context(), cfg)
		}}
	cmd.Flags().StringVar(&file, "config", "", "YAML config file")
	bindServerFlags(cmd.Flags(), c.Getenv)
	cmd.AddCommand(c.backupCommand(), c.restoreCommand(), c.serverDoctor())
	cmd.AddCommand(admin.Server(c.Session)...)
	return cmd
}

// opened is an open store with its maintenance.
type opened interface {
	store.Store
	Run(ctx context.Context) error
	Close() error
	Backup(ctx context.Context, path string) error
	Snapshot(ctx context.Context) (io.ReadCloser, error)
}

// open opens the store that cfg names.
func (cfg *serverConfig) open(ctx context.Context, log *slog.Logger) (opened, error) {
	if cfg.Etcd == "" {
		return etcd.OpenEmbedded(ctx, etcd.EmbeddedConfig{Dir: cfg.Data, Logger: log.With("part", "store")})
	}
	ext := etcd.ExternalConfig{Endpoints: strings.Split(cfg.Etcd, ","), CAFile: cfg.EtcdCA, CertFile: cfg.EtcdCert, KeyFile: cfg.EtcdKey,
		Username: cfg.EtcdUser, Logger: log.With("part", "store")}
	if cfg.EtcdPasswordFile != "" {
		b, err := os.ReadFile(cfg.EtcdPasswordFile)
		if err != nil {
			return nil, fmt.Errorf("cannot read the password of etcd: %w", err)
		}
		ext.Password = sealed.Plain(strings.TrimSpace(string(b)))
	}
	return etcd.Dial(ctx, ext)
}

// logger returns a logger to standard error with the level in cfg.
func (c *cli) logger(cfg serverConfig) *slog.Logger {
	var level slog.Level
	if err := level.UnmarshalText([]byte(cfg.LogLevel)); err != nil {
		level = slog.LevelInfo // cannot happen: validate has checked the level
	}
	return slog.New(slog.NewTextHandler(c.Err, &slog.HandlerOptions{Level: level}))
}

// serve runs lull server: it opens the store and all other parts, and serves until
// ctx ends.
func (c *cli) serve(ctx context.Context, cfg serverConfig) (err error) {
	log := c.logger(cfg)
	// Check everything that may be rejected before a store and a token are created.
	identity, err := cfg.identity()
	if err != nil {
		return err
	}
	prices, err := cfg.prices()
	if err != nil {
		return err
	}
	// A controller listens only if other servers can reach it.
	var l net.Listener
	if cfg.Role != "controller" || cfg.Advertise != "" {
		if l, err = cfg.listen(); err != nil {
			return err
		}
		defer l.Close()
	}
	db, err := cfg.open(ctx, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	seal, err := cfg.sealer()
	if err != nil {
		return err
	}
	f, err := cfg.fleet(ctx, db, seal)
	if err != nil {
		return err
	}
	tokens := access.New(db)
	if err := c.announce(ctx, cfg, tokens, cfg.base(l)); err != nil {
		return err
	}
	ctl, err := c.newControl(cfg, f, seal, log)
	defer func() { err = errors.Join(err, ctl.close()) }()
	if err != nil {
		return err
	}
	note, err := c.newNotifier(cfg, f, seal, log)
	if err != nil {
		return err
	}
	ctl.metrics.MustRegister(note)
	var asked http.Handler
	var others server.OtherHosts
	if ctl.peers != nil {
		asked, others = ctl.peers.Handler(), ctl.peers
	}
	api, err := server.New(server.Options{Fleet: f, Tokens: tokens, Version: version, BuildDate: buildDate, Shadow: cfg.Shadow, Identity: identity, PublicURL: cfg.PublicURL, Program: agentProgram(), Log: log.With("part", "api"),
		Web: web.Handler(), Live: ctl.live, Admin: ctl.admin, Regions: ctl.regions, Instances: ctl.instances, CML: ctl.cml, Metrics: ctl.metrics, Snapshot: db.Snapshot, Evidence: ctl.evidence, Record: ctl.record(), Prices: prices, PriceSource: ctl.prices, Notifier: note, Peers: asked, Others: others, Name: ctl.name})
	if err != nil {
		return err
	}
	ctl.metrics.MustRegister(api.Collector())
	if ctl.peers != nil {
		ctl.peers.Serve(api)
	}
	tasks := append([]task.Task{task.Loop("the store's upkeep", db.Run)}, ctl.tasks...)
	if cfg.Role != "api" {
		tasks = append(tasks, task.Loop(note.String(), note.Run))
	}
	handler := api.Handler()
	switch {
	case cfg.Role != "controller":
		tasks = append(tasks, api)
	case cfg.Advertise != "":
		handler = asked // a controller answers only other servers
	default:
		return task.Run(ctx, tasks...)
	}
	tasks = append(tasks, c.listener(cfg, l, handler, log))
	return task.Run(ctx, tasks...)
}

// agentProgram returns the program that launched machines download: lull-agent beside
// this program or, if that is missing, this program. It returns "" on systems other
// than Linux.
func agentProgram() string {
	if runtime.GOOS != "linux" {
		return ""
	}
	if self, err := os.Executable(); err == nil {
		if slim := filepath.Join(filepath.Dir(self), setup.Slim); exists(slim) {
			return slim
		}
	}
	return "/proc/self/exe"
}

func exists(file string) bool { _, err := os.Stat(file); return err == nil }

// fleet returns a Fleet over an open store.
func (cfg *serverConfig) fleet(ctx context.Context, db store.Store, seal *sealed.Sealer) (*fleet.Fleet, error) {
	id, err := fleetID(ctx, db, cfg.FleetID)
	if err != nil {
		return nil, err
	}
	accounts, err := accountsOf(cfg.Accounts)
	if err != nil {
		return nil, err
	}
	f, err := fleet.New(fleet.Options{Store: db, ID: id, Seal: seal, Accounts: accountNames(accounts), Flags: cfg.flags, Env: cfg.env, File: cfg.file})
	if err != nil {
		return nil, err
	}
	if err := f.MarkAudit(ctx); err != nil {
		return nil, err
	}
	return f, f.Refresh(ctx)
}

// identity is the store's record of the fleet's ID.
type identity struct {
	ID string `json:"id"`
}

const identityKey = "fleet/id"

// fleetID returns the ID in the store. If there is none, it stores want or, if want
// is empty, a new ID. It is an error if want differs from the stored ID, because
// instances carry the ID in a tag.
func fleetID(ctx context.Context, db store.Store, want string) (string, error) {
	codec := store.Codec[identity]{Version: 1}
	rec := identity{ID: want}
	if want == "" {
		rec.ID = "fleet-" + strings.ToLower(rand.Text()[:10])
	}
	v, err := store.Update(ctx, db, identityKey, func(old store.Value) ([]byte, []store.Op, error) {
		if old.Exists() {
			return old.Data, nil, nil
		}
		data, err := codec.Encode(identityKey, rec)
		return data, nil, err
	})
	if err != nil {
		return "", fmt.Errorf("cannot determine the fleet ID: %w", err)
	}
	if rec, err = codec.Decode(identityKey, v.Data); err != nil {
		return "", err
	}
	if want != "" && rec.ID != want {
		return "", fmt.Errorf("cannot use fleet-id %q: the store belongs to fleet %q, whose ID the EC2 instances carry", want, rec.ID)
	}
	return rec.ID, nil
}

// sealer returns a Sealer with the key in a file. Without a configured file, the key
// is created in the data directory. With etcd, a configured file is required, because
// every server needs the same key; nil is returned without one.
func (cfg *serverConfig) sealer() (*sealed.Sealer, error) {
	name := cfg.SealKey
	if name == "" && cfg.Etcd != "" {
		return nil, nil
	}
	if name == "" {
		name = filepath.Join(cfg.Data, "seal.key")
	}
	key, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) && cfg.SealKey == "" {
		key = make([]byte, 32)
		if _, err := rand.Read(key); err != nil {
			return nil, fmt.Errorf("cannot create the sealing key: %w", err)
		}
		err = writeNew(name, key)
	}
	if err != nil {
		return nil, fmt.Errorf("cannot use the sealing key: %w", err)
	}
	return sealed.NewSealer(key)
}

// writeNew writes a file with private permissions, atomically and durably.
func writeNew(name string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// announce creates the first admin token and prints it, together with a sign-in link.
// On a later start it prints only a link, and only to a terminal, whose user has
// access to the server's data anyway. base is the API's URL; empty if there is no
// API.
func (c *cli) announce(ctx context.Context, cfg serverConfig, tokens *access.Tokens, base string) error {
	token, err := tokens.First(ctx)
	if err != nil {
		return err
	}
	id := access.ID(token)
	if token == "" && cfg.NewToken {
		var t access.Token
		if t, token, err = tokens.Create(ctx, access.Wanted{Name: "admin " + time.Now().UTC().Format(time.RFC3339), Role: access.Admin, By: "command line of the server"}); err != nil {
			return err
		}
		id = t.ID
	}
	if token != "" {
		if cfg.TokenFile != "" {
			if err := writeNew(cfg.TokenFile, []byte(token+"\n")); err != nil {
				return fmt.Errorf("cannot write the admin token: %w", err)
			}
		}
		fmt.Fprintf(c.Out, "admin token (shown once): %s\n", token)
	} else if term.IsTerminal(c.Out) {
		if id, err = tokens.FirstID(ctx); err != nil {
			return err
		}
	}
	if id == "" || base == "" {
		return nil
	}
	link, err := tokens.Link(ctx, id, linkTTL)
	if err != nil {
		return err
	}
	fmt.Fprintf(c.Out, "dashboard (the link signs in once, within %s): %s%s#%s\n", term.Span(linkTTL), base, server.SignInPath, link)
	return nil
}

// linkTTL is the lifetime of a sign-in link.
const linkTTL = 15 * time.Minute

// base returns the URL at which a browser on this machine reaches the API on l.
func (cfg *serverConfig) base(l net.Listener) string {
	if l == nil || cfg.Role == "controller" {
		return ""
	}
	if cfg.PublicURL != "" {
		return cfg.PublicURL
	}
	at := l.Addr().String()
	if host, port, err := net.SplitHostPort(at); err == nil && net.ParseIP(host).IsUnspecified() {
		at = net.JoinHostPort("127.0.0.1", port)
	}
	if cfg.TLSCert != "" {
		return "https://" + at
	}
	return "http://" + at
}

// listen opens the API's address, with TLS if a certificate is configured.
func (cfg *serverConfig) listen() (net.Listener, error) {
	l, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("cannot listen: %w", err)
	}
	return l, nil
}

// stopWithin is how long requests may continue after the server was asked to stop.
const stopWithin = 5 * time.Second

// listener returns a task that serves the API on l until it is asked to stop. Streams
// then end at once, other requests within stopWithin.
func (c *cli) listener(cfg serverConfig, l net.Listener, h http.Handler, log *slog.Logger) task.Task {
	return task.Func("the listener", func(ctx context.Context, ready func()) error {
		srv := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
			BaseContext: func(net.Listener) context.Context { return ctx }, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
		scheme := "http"
		if cfg.TLSCert != "" {
			cert, err := server.NewCertificate(cfg.TLSCert, cfg.TLSKey)
			if err != nil {
				return errors.Join(err, l.Close())
			}
			srv.TLSConfig, scheme = cert.Config(), "https"
		}
		ended := make(chan error, 1)
		go func() {
			if scheme == "https" {
				ended <- srv.ServeTLS(l, "", "")
			} else {
				ended <- srv.Serve(l)
			}
		}()
		fmt.Fprintf(c.Out, "serving on %s://%s\n", scheme, l.Addr())
		ready()
		select {
		case err := <-ended:
			return fmt.Errorf("cannot serve: %w", err)
		case <-ctx.Done():
		}
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopWithin)
		defer cancel()
		if err := srv.Shutdown(last); err != nil {
			_ = srv.Close() // cuts connections that are still open
		}
		<-ended
		return nil
	})
}

func (c *cli) backupCommand() *cobra.Command {
	var file string
	cmd := &cobra.Command{Use: "backup FILE", Short: "Back up the whole state to a file", Args: term.Args(cobra.ExactArgs(1)),
		Long: `Back up the whole state to a file: from a running server with --server, from a cluster
with --etcd, otherwise from the data directory of a stopped server.`,
		Example: "  lull server backup state.backup --server http://127.0.0.1:7070",
		RunE: func(cmd *cobra.Command, a []string) error {
			if c.Server != "" {
				return c.backupRunning(cmd.Context(), a[0])
			}
			cfg, _, err := resolveServer(c.Getenv, file, cmd.Flags())
			if err != nil {
				return term.Usage(err)
			}
			cfg.LogLevel = "error"
			db, err := cfg.open(cmd.Context(), c.logger(cfg))
			if err != nil {
				return err
			}
			if err := errors.Join(db.Backup(cmd.Context(), a[0]), db.Close()); err != nil {
				return err
			}
			fmt.Fprintf(c.Err, "written to %s, without the sealing key\n", a[0])
			return nil
		}}
	cmd.Flags().StringVar(&file, "config", "", "YAML config file")
	bindServerFlags(cmd.Flags(), c.Getenv)
	return cmd
}

// backupRunning downloads a backup from a running server.
func (c *cli) backupRunning(ctx context.Context, path string) error {
	cl, err := c.ServerClient()
	if err != nil {
		return err
	}
	snapshot, err := cl.Backup(ctx)
	if err != nil {
		return err
	}
	if err := errors.Join(etcd.SaveBackup(path, snapshot), snapshot.Close()); err != nil {
		return err
	}
	fmt.Fprintf(c.Err, "written to %s, without the sealing key\n", path)
	return nil
}

func (c *cli) restoreCommand() *cobra.Command {
	var data string
	cmd := &cobra.Command{Use: "restore FILE", Short: "Create a data directory from a backup", Args: term.Args(cobra.ExactArgs(1)),
		Long: `Create a data directory from a backup. A backup does not contain seal.key: copy the old
one there too, or stored secrets cannot be decrypted.`,
		Example: "  lull server restore state.backup --data new-data",
		RunE: func(_ *cobra.Command, a []string) error {
			if err := etcd.Restore(a[0], data); err != nil {
				return err
			}
			fmt.Fprintf(c.Err, "restored into %s; copy its seal.key there too\n", data)
			return nil
		}}
	cmd.Flags().StringVar(&data, "data", defaultServerConfig(c.Getenv).Data, "data directory to create; it must be empty or absent")
	return cmd
}

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/spf13/cobra"

	"lull/internal/cli/reporting"
	"lull/internal/cli/term"
	"lull/internal/sim"
	"lull/internal/sim/world"
)

// simFlags are the flags of lull sim.
type simFlags struct {
	listen, scenario, state, cml string
	speed                        float64
	seed                         uint64
}

func (c *cli) simCommand() *cobra.Command {
	var f simFlags
	cmd := &cobra.Command{Use: "sim", Short: "Run a simulated cloud with scripted users", Args: term.Args(cobra.NoArgs),
		Long: `Run a simulated cloud on this machine: EC2, STS, CloudWatch, instance metadata and CML
hosts, with scripted users. Point a server at it with

  AWS_ENDPOINT_URL=http://127.0.0.1:7071 AWS_ACCESS_KEY_ID=test \
      AWS_SECRET_ACCESS_KEY=test lull server --cml-port 8443`,
		Example: "  lull sim\n  lull sim --speed 60 --cml-port 8443",
		RunE:    func(cmd *cobra.Command, _ []string) error { return c.simulate(cmd.Context(), f) }}
	fl := cmd.Flags()
	fl.StringVar(&f.listen, "listen", "127.0.0.1:7071", "listen address of the AWS APIs and the control API, on loopback")
	fl.StringVar(&f.cml, "cml-port", "8443", "port of the CML hosts, whose addresses are in 127.64.0.0/10")
	fl.Float64Var(&f.speed, "speed", 0, "speed relative to real time; 0 uses the scenario's")
	fl.Uint64Var(&f.seed, "seed", 0, "random seed; 0 uses the scenario's")
	fl.StringVar(&f.scenario, "scenario", "", "scenario in YAML; empty is a dozen workers and their users")
	fl.StringVar(&f.state, "state", "", "file that the simulated world is loaded from and saved to")
	return cmd
}

func (c *cli) simulate(ctx context.Context, f simFlags) error {
	cfg, err := f.world()
	if err != nil {
		return term.Usage(err)
	}
	host, _, err := net.SplitHostPort(f.listen)
	if err != nil || !reporting.Loopback(host) {
		return term.Usage(fmt.Errorf("cannot listen on %q: the simulator only listens on loopback; want 127.0.0.1:port", f.listen))
	}
	s, err := sim.New(sim.Options{Scenario: cfg, State: f.state})
	if err != nil {
		return err
	}
	api, err := net.Listen("tcp", f.listen)
	if err != nil {
		return fmt.Errorf("cannot listen: %w", err)
	}
	cml, err := net.Listen("tcp", net.JoinHostPort("0.0.0.0", f.cml))
	if err != nil {
		return errors.Join(fmt.Errorf("cannot listen for CML: %w", err), api.Close())
	}
	fmt.Fprintf(c.Out, "AWS and control API on http://%s, CML on port %d of each host's address\n", api.Addr(), cml.Addr().(*net.TCPAddr).Port)
	return s.Run(ctx, sim.Listeners{API: api, CML: sim.LoopbackOnly(cml)})
}

func (f simFlags) world() (world.Config, error) {
	cfg, err := sim.Default()
	if f.scenario != "" {
		var b []byte
		if b, err = os.ReadFile(f.scenario); err != nil {
			return cfg, fmt.Errorf("cannot read scenario: %w", err)
		}
		cfg, err = sim.ParseScenario(b)
	}
	if f.speed < 0 {
		return cfg, fmt.Errorf("cannot use --speed %g: want 0 or more", f.speed)
	}
	if f.speed > 0 {
		cfg.Speed = f.speed
	}
	if f.seed > 0 {
		cfg.Seed = f.seed
	}
	return cfg, err
}

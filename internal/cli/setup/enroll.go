//go:build linux && !portable

package setup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/reporting"
	"lull/internal/cli/term"
	"lull/internal/lib/delay"
	"lull/internal/lib/httpx"
	"lull/internal/platform/imds"
	"lull/internal/protocol/control"
)

// Paths of the files of an enrolled agent, below the root.
const (
	enrolledToken    = "etc/lull/agent-token"
	enrolledCA       = "etc/lull/agent-server-ca.pem"
	enrolledSettings = "etc/default/lull-agent"
)

func (c verbs) agentEnroll() *cobra.Command {
	var r reporting.Target
	var root, tokenFile, enrollment string
	var noStart bool
	cmd := &cobra.Command{
		Use:   "enroll",
		Short: "Connect this machine's agent to a server",
		Long: `Connect this machine's agent to a server: store its token and settings where the
systemd unit reads them, and restart the agent. A token is bound to one machine.
An admin creates it with

  lull token create NAME --role agent --machine INSTANCE-ID

The token is read from --token-file or standard input, never from the command
line, where every local user could see it.

A worker launched from a template with agent: true enrolls itself: its user data
runs this command with --enrollment-file. The secret in that file is exchanged
for a token bound to this instance, which replaces an earlier one.`,
		Example: "  lull agent enroll --server https://lull.example.com:7070 --token-file token\n  lull agent enroll --server https://lull.example.com:7070 --server-ca ca.pem --token-file token",
		Args:    term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			in := c.In
			if enrollment != "" {
				token, err := c.exchange(cmd.Context(), r, enrollment)
				if err != nil {
					return err
				}
				in = strings.NewReader(token)
			} else if tokenFile != "" {
				f, err := os.Open(tokenFile)
				if err != nil {
					return fmt.Errorf("cannot read the token: %w", err)
				}
				defer f.Close()
				in = f
			}
			l, err := Enroll(root, r, in)
			if err != nil {
				return err
			}
			if filepath.Clean(root) == "/" && !noStart {
				if err := systemctl("try-restart lull-agent.service"); err != nil {
					return err
				}
			}
			return c.printPlaced(l)
		},
	}
	f := cmd.Flags()
	f.StringVar(&r.Server, "server", "", "server to report to; https required unless it runs on this machine")
	f.StringVar(&tokenFile, "token-file", "", "file with the token (default: standard input)")
	f.StringVar(&enrollment, "enrollment-file", "", "file with an enrollment secret to exchange for a token")
	cmd.MarkFlagsMutuallyExclusive("token-file", "enrollment-file")
	f.StringVar(&r.ServerCA, "server-ca", "", "CA certificates in PEM for the server's certificate; a copy is stored")
	f.StringVar(&r.Machine, "machine", "", "machine name in the token (default: the instance ID or, outside a cloud, the host name)")
	f.StringVar(&root, "root", "/", "enroll the system under this directory")
	f.BoolVar(&noStart, "no-start", false, "do not restart the agent")
	return cmd
}

// exchangeWithin is how long exchange waits for the server to answer, and to know the
// instance.
const exchangeWithin = 10 * time.Minute

// exchange returns the token that the server issues for the enrollment secret in a
// file. While the server is unavailable, it retries.
func (c verbs) exchange(ctx context.Context, r reporting.Target, file string) (string, error) {
	if r.Server == "" {
		return "", term.Usage(errors.New("cannot enroll without --server"))
	}
	r.TokenFile = file
	if err := r.Check("agent", reporting.AgentOption); err != nil {
		return "", term.Usage(err)
	}
	secret, err := r.ReadToken(reporting.TokenSource{Option: "enrollment-file", Read: reporting.HostTokens.Read})
	if err != nil {
		return "", err
	}
	hc, err := r.HTTPClient(&http.Transport{Proxy: http.ProxyFromEnvironment})
	if err != nil {
		return "", err
	}
	defer hc.CloseIdleConnections()
	cl, err := control.NewClient(r.Server, secret, hc)
	if err != nil {
		return "", err
	}
	metadata := imds.New(imds.Options{Endpoint: c.Getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT")})
	ctx, cancel := context.WithTimeout(ctx, exchangeWithin)
	defer cancel()
	for failures := 1; ; failures++ {
		var made control.Enrolled
		i, err := metadata.Identity(ctx)
		if err == nil {
			made, err = cl.Enroll(ctx, control.Enrollment{InstanceID: i.InstanceID})
		}
		if p, answered := errors.AsType[*httpx.Problem](err); err == nil || answered && p.Status < 500 {
			return made.Token, err
		}
		if delay.For(ctx, delay.Backoff(failures, time.Second, 30*time.Second)) != nil {
			return "", fmt.Errorf("cannot enroll: %w", err)
		}
	}
}

// Enroll writes the token and the settings for reporting to r below root. It
// validates everything before it writes anything.
func Enroll(root string, r reporting.Target, token io.Reader) ([]placed, error) {
	if r.Server == "" {
		return nil, term.Usage(errors.New("cannot enroll without --server"))
	}
	b, err := io.ReadAll(io.LimitReader(token, 1024))
	if err != nil {
		return nil, fmt.Errorf("cannot read the token: %w", err)
	}
	secret := strings.TrimSpace(string(b))
	if secret == "" || strings.ContainsFunc(secret, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		return nil, term.Usage(errors.New("cannot enroll: want one token on standard input or in --token-file"))
	}
	files := []struct {
		path    string
		content string
	}{{enrolledToken, secret + "\n"}}
	settings := [][2]string{{"LULL_AGENT_SERVER", r.Server}, {"LULL_AGENT_TOKEN_FILE", "/" + enrolledToken}}
	r.TokenFile = "/" + enrolledToken
	if err := r.Check("agent", reporting.AgentOption); err != nil {
		return nil, term.Usage(err)
	}
	if r.ServerCA != "" {
		pem, err := os.ReadFile(r.ServerCA)
		if err != nil {
			return nil, fmt.Errorf("cannot read server-ca: %w", err)
		}
		files = append(files, struct{ path, content string }{enrolledCA, string(pem)})
		settings = append(settings, [2]string{"LULL_AGENT_SERVER_CA", "/" + enrolledCA})
	}
	if r.Machine != "" {
		settings = append(settings, [2]string{"LULL_AGENT_MACHINE", r.Machine})
	}
	for _, s := range settings {
		if strings.ContainsFunc(s[1], func(r rune) bool { return r <= ' ' || r >= 0x7f || strings.ContainsRune("\"'\\#", r) }) {
			return nil, term.Usage(fmt.Errorf("cannot enroll: %s %q contains a character with a special meaning to systemd", s[0], s[1]))
		}
	}
	old, err := os.ReadFile(filepath.Join(root, enrolledSettings))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("cannot read the agent's settings: %w", err)
	}
	files = append(files, struct{ path, content string }{enrolledSettings, withSettings(string(old), settings)})
	var l []placed
	for _, f := range files {
		if l, err = place(l, filepath.Join(root, f.path), 0o600, []byte(f.content), ""); err != nil {
			return l, err
		}
	}
	return l, nil
}

// withSettings returns the environment file old with each of settings in it once, and
// without other settings of an earlier enrollment.
func withSettings(old string, settings [][2]string) string {
	var b strings.Builder
	for line := range strings.Lines(old) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch name {
		case "LULL_AGENT_SERVER", "LULL_AGENT_TOKEN_FILE", "LULL_AGENT_SERVER_CA", "LULL_AGENT_MACHINE":
			continue
		}
		b.WriteString(strings.TrimRight(line, "\n") + "\n")
	}
	for _, s := range settings {
		b.WriteString(s[0] + "=" + s[1] + "\n")
	}
	return b.String()
}

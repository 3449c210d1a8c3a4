package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"lull/internal/cli/options"
	"lull/internal/fleet"
	"lull/internal/fleet/settings"
	"lull/internal/server"
)

// serverPages returns the generated pages about lull server: its settings and its
// OpenAPI document, by file name.
func serverPages() (map[string][]byte, error) {
	f, err := fleet.New(fleet.Options{ID: "reference"}) // with no store, because none is read
	if err != nil {
		return nil, err
	}
	s, err := server.New(server.Options{Fleet: f, Version: "1"})
	if err != nil {
		return nil, err
	}
	doc, err := json.MarshalIndent(s.API().OpenAPI(), "", "  ")
	if err != nil {
		return nil, fmt.Errorf("cannot encode the API's description: %w", err)
	}
	return map[string][]byte{"server-openapi.json": append(doc, '\n'), "config-server.md": []byte(serverSettingsPage())}, nil
}

func serverSettingsPage() string {
	var b strings.Builder
	b.WriteString("# Settings of lull server\n\nGenerated from cmd/lull/server_config.go and internal/fleet/settings/settings.go.\n" +
		"Precedence: flag, environment, stored setting (those of the fleet only: `lull settings set`), config file (`--config`), default.\n\n## The process\n\n")
	def := defaultServerConfig(func(string) string { return "" })
	def.Data = "/var/lib/lull/server (root), $XDG_STATE_HOME/lull/server"
	options.Rows(&b, def, serverOptions)
	b.WriteString("\n## The fleet\n\n| setting | flag | environment | unit | default | meaning |\n|---|---|---|---|---|---|\n")
	for _, f := range settings.Fields() {
		fmt.Fprintf(&b, "| %s | `--%s` | `%s` | %s | `%s` | %s |\n", f.Key, flagOf(f), f.Env, f.Unit, f.Default, f.Doc)
	}
	return b.String()
}

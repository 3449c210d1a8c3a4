package project

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/schema"
)

// field is an attribute of a service in lull.yaml.
type field struct {
	name string
	kind string // type in the JSON schema: string, boolean, number, array, or any if several are allowed
	doc  string
}

// idleFields are the attributes that lull adds to a service: when and how it sleeps.
// In a compose.yaml they are below x-lull or in labels (lull.pause-after).
var idleFields = []field{
	{"runtime", "string", "process (default without an image), container (default with one) or microvm"},
	{"pause_after", "string", "idle time until it is paused, such as 30s; 0 never pauses"},
	{"reclaim_after", "string", "time in paused until its memory is paged out; 0 is off"},
	{"hibernate_after", "string", "time in paused until it is hibernated to disk; 0 is off"},
	{"stop_after", "string", "time in paused until it is stopped; 0 never stops"},
	{"quiet_connection_after", "string", "ignore connections without traffic for this long, unless a request is unanswered; 0 is off"},
	{"ready_timeout", "string", "maximum time from its start until it listens"},
	{"idle_policy", "string", "default, or leases_only to ignore its own activity"},
	{"probes", "array", "activity probes: the short form of lull run --probe, or mappings with name, kind and the settings of the kind"},
	{"wake", "boolean", "start it on a connection after lull stopped it; if set to true explicitly, also before its first start and after it exits"},
	{"wake_on_outbound", "boolean", "also wake it when data arrives on its outbound connections"},
	{"schedule", "any", "times at which it must run, as in a crontab: one, or a list"},
	{"net", "string", "network access of a microVM: none, outbound or full"},
	{"path", "string", "how clients reach its ports: auto, direct or relay"},
}

// composeFields are the supported attributes of a Compose file.
var composeFields = []field{
	{"image", "string", "a directory, an image file or a registry reference; without one, command runs as a program of this machine"},
	{"command", "any", "the program and its arguments, as a list or in one line"},
	{"entrypoint", "any", "program that command is passed to as arguments"},
	{"environment", "any", "variables, as a list of KEY=VALUE or a mapping"},
	{"env_file", "any", "files with variables"},
	{"working_dir", "string", "default: the folder of this file, for a program of this machine"},
	{"user", "string", "name or uid[:gid] to run as"},
	{"ports", "array", "PORT, or PUBLISHED:TARGET; without an address, 127.0.0.1"},
	{"expose", "array", "ports of this machine's loopback that the service listens on and that wake it"},
	{"depends_on", "any", "services to start before this one"},
	{"restart", "string", "no, on-failure (default), always or unless-stopped"},
	{"stop_grace_period", "string", "time between the request to exit and the kill"},
	{"mem_limit", "any", "memory limit, such as 512m"},
	{"cpus", "number", "CPUs"},
	{"volumes", "array", "one folder of this machine that a container or microVM shares"},
	{"profiles", "array", "start the service only if COMPOSE_PROFILES contains one of these"},
	{"extends", "any", "service to copy settings from"},
	{"labels", "any", "labels of the instance"},
}

// ignoredFields are attributes that lull ignores because they make no difference for
// the users of a service. A note says that they have no effect.
var ignoredFields = []string{"container_name", "hostname", "healthcheck", "networks", "logging", "init", "tty", "stdin_open", "pull_policy", "attach", "annotations", "develop"}

// refused returns the attributes of the Compose specification that lull does not
// support and cannot ignore.
func refused() []loader.UnsupportedAttributePattern {
	known := map[string]bool{"deploy": true, "scale": true}
	for _, f := range composeFields {
		known[f.name] = true
	}
	for _, name := range ignoredFields {
		known[name] = true
	}
	var out []loader.UnsupportedAttributePattern
	for _, p := range schema.AttributePaths() {
		parts := p.Parts()
		if len(parts) == 3 && parts[0] == "services" && !known[parts[2]] {
			out = append(out, loader.UnsupportedAttributePattern{Path: p})
		}
	}
	return out
}

// Schema returns the JSON schema of lull.yaml, for editors.
func Schema() []byte {
	props := map[string]any{}
	for _, f := range slices.Concat(idleFields, composeFields) {
		p := map[string]any{"description": f.doc}
		if f.kind != "any" {
			p["type"] = f.kind
		}
		props[f.name] = p
	}
	for _, name := range ignoredFields {
		props[name] = map[string]any{"description": "has no effect; accepted as part of a Compose file"}
	}
	for name, words := range map[string]string{"runtime": "process container microvm", "idle_policy": "default leases_only", "net": "none outbound full", "path": "auto direct relay"} {
		props[name].(map[string]any)["enum"] = strings.Fields(words)
	}
	service := map[string]any{"type": "object", "properties": props, "additionalProperties": false, "patternProperties": map[string]any{"^x-": map[string]any{}}}
	out, err := json.MarshalIndent(map[string]any{
		"$schema": "https://json-schema.org/draft/2020-12/schema",
		"title":   "lull.yaml",
		"type":    "object",
		"properties": map[string]any{
			"name":     map[string]any{"type": "string", "description": "name of the project, with which the names of its instances begin (default: the folder's)"},
			"services": map[string]any{"type": "object", "description": "services by name", "additionalProperties": service},
			"include":  map[string]any{"description": "other project files to merge"},
			"networks": map[string]any{"description": "has no effect; accepted as part of a Compose file"},
			"version":  map[string]any{"type": "string", "description": "has no effect"},
		},
		"patternProperties":    map[string]any{"^x-": map[string]any{}},
		"additionalProperties": false,
	}, "", "  ")
	if err != nil {
		panic(err) // impossible: the schema is built from our own values
	}
	return append(out, '\n')
}

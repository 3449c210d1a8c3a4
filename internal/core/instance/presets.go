package instance

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// preset is a ready-made probe.
type preset struct {
	name string
	of   func(target string) (Probe, error) // makes the probe; target is the text after the name, which may be empty
}

// presets are the ready-made probes, in the order in which they are listed.
var presets = []preset{
	{"postgres", postgresProbe},
	{"redis", redisProbe},
	{"beanstalkd", beanstalkdProbe},
	{"rabbitmq", at("http://guest:guest@127.0.0.1:15672", "/api/overview", Probe{Kind: ProbeHTTP, Field: "queue_totals.messages"})},
	{"jupyter", at("http://127.0.0.1:8888", "", Probe{Kind: ProbeJupyter})},
	{"jupyterhub", at("http://127.0.0.1:8000", "/hub/api/users?state=active", Probe{Kind: ProbeHTTP, Field: "."})},
	{"minecraft", minecraftProbe},
	{"ollama", at("http://127.0.0.1:11434", "/api/ps", Probe{Kind: ProbeHTTP, Field: "models"})},
	{"vllm", at("http://127.0.0.1:8000", "/metrics", Probe{Kind: ProbePrometheus, Metric: "vllm:num_requests_running"})},
	{"actions-runner", actionsProbe},
	{"slurm", slurmProbe},
}

// ProbePresets returns the names of the ready-made probes.
func ProbePresets() (names []string) {
	for _, p := range presets {
		names = append(names, p.name)
	}
	return names
}

// findPreset returns the ready-made probe of that name; nil for none.
func findPreset(name string) *preset {
	for n := range presets {
		if presets[n].name == name {
			return &presets[n]
		}
	}
	return nil
}

// shell returns a probe that runs a shell command.
func shell(text string) Probe {
	return Probe{Kind: ProbeExec, Command: []string{"/bin/sh", "-c", text}}
}

// at returns a function for preset.of that makes a probe of a path below the URL
// of a server.
func at(server, path string, p Probe) func(string) (Probe, error) {
	return func(target string) (Probe, error) {
		if strings.Contains(target, "#") {
			return Probe{}, fmt.Errorf("%q is not the URL of the server alone", target)
		}
		p := p
		p.URL = strings.TrimRight(cmp.Or(target, server), "/") + path
		return p, nil
	}
}

// postgresProbe returns a probe that is active while a session other than the
// probe's own runs a statement, has a transaction open or sends the log to a
// replica, or while autovacuum works.
func postgresProbe(conninfo string) (Probe, error) {
	if strings.ContainsAny(conninfo, "'\x00\n") {
		return Probe{}, errors.New("a connection string with quotes is not supported: define an exec probe instead")
	}
	conninfo = cmp.Or(conninfo, "host=127.0.0.1 user=postgres dbname=postgres")
	return shell(`n=$(psql -XAtqw -d '` + conninfo + `' -c "select count(*) from pg_stat_activity where pid <> pg_backend_pid() and ` +
		`(backend_type in ('autovacuum worker', 'walsender') or backend_type like '%parallel worker%' or ` +
		`backend_type = 'client backend' and (state is null or state not in ('idle', 'disabled')))") || exit 2; [ "$n" -gt 0 ]`), nil
}

var plainWord = regexp.MustCompile(`^[a-zA-Z0-9.:_@/{}-]+$`)

// splitAddress splits the HOST:PORT of a probe. The host may be a name.
func splitAddress(addr string) (host, port string, err error) {
	host, port, err = net.SplitHostPort(addr)
	n, perr := strconv.ParseUint(port, 10, 16)
	if err != nil || perr != nil || n == 0 || !plainWord.MatchString(host) || host[0] == '-' {
		return "", "", fmt.Errorf("%q is not HOST:PORT", addr)
	}
	return host, port, nil
}

// redisProbe returns a probe that is active while a client is blocked, a replica
// is connected, or the server loads, saves or rewrites its data. If target ends
// in #LIST, it is also active while that list has an element.
func redisProbe(target string) (Probe, error) {
	addr, list, isList := strings.Cut(target, "#")
	addr = cmp.Or(addr, "127.0.0.1:6379")
	host, port, err := splitAddress(addr)
	if err != nil {
		return Probe{}, err
	}
	redis := "redis-cli -h " + host + " -p " + port
	if isList {
		if !plainWord.MatchString(list) {
			return Probe{}, fmt.Errorf("the list name %q is not supported: define an exec probe instead", list)
		}
		return shell(`n=$(` + redis + ` llen '` + list + `') || exit 2; case $n in ''|*[!0-9]*) echo "$n"; exit 2;; esac; [ "$n" -gt 0 ]`), nil
	}
	return shell(`i=$(` + redis + ` info) || exit 2; printf '%s\n' "$i" | tr -d '\r' | awk -F: '` +
		`$1 ~ /^(blocked_clients|connected_slaves|loading|rdb_bgsave_in_progress|aof_rewrite_in_progress)$/ {seen++; n += $2} ` +
		`END {if (seen < 5) exit 2; exit n > 0 ? 0 : 1}'`), nil
}

// maxTube bounds the name of a tube in bytes. It is beanstalkd's own limit.
const maxTube = 200

func beanstalkdProbe(target string) (Probe, error) {
	addr, tube, _ := strings.Cut(target, "#")
	return Probe{Kind: ProbeBeanstalkd, Address: cmp.Or(addr, "127.0.0.1:11300"), Field: tube}, nil
}

func minecraftProbe(target string) (Probe, error) {
	return Probe{Kind: ProbeMinecraft, Address: cmp.Or(target, "127.0.0.1:25565")}, nil
}

// actionsProbe returns a probe that is active while a runner of GitHub Actions
// works on a job, for which it starts a separate process. dir is the runner's
// directory; "" means every runner of the machine.
func actionsProbe(dir string) (Probe, error) {
	switch {
	case dir == "":
		return shell("pgrep -x Runner.Worker >/dev/null"), nil
	case !filepath.IsAbs(dir) || !plainWord.MatchString(dir):
		return Probe{}, fmt.Errorf("%q is not the absolute path of a runner", dir)
	}
	return shell("pgrep -f '^" + strings.TrimRight(dir, "/") + "/bin[^ ]*/Runner[.]Worker( |$)' >/dev/null"), nil
}

// slurmProbe returns a probe that is active while SLURM has a job on the node; ""
// means this machine.
func slurmProbe(node string) (Probe, error) {
	switch {
	case node == "":
		node = `"$(hostname -s)"`
	case !plainWord.MatchString(node) || node[0] == '-':
		return Probe{}, fmt.Errorf("%q is not the name of a node", node)
	}
	return shell("n=$(squeue -h -o %i -w " + node + `) || exit 2; [ -n "$n" ]`), nil
}

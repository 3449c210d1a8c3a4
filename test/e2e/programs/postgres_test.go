package programs

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
)

// postgres is a PostgreSQL server that runs as Debian's user postgres.
type postgres struct {
	*workload
	sent int // transactions that pgbench saw committed
}

// tool returns the path of one of PostgreSQL's programs, which Debian installs by
// version.
func tool(t *testing.T, name string) string {
	t.Helper()
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("%s is not installed", name)
	}
	daemontest.Need(t, err, "postgresql")
	return found[len(found)-1]
}

func postgresAt(h *daemontest.Host, path instance.Path, quiet time.Duration) *postgres {
	server, initdb := tool(h.T, "postgres"), tool(h.T, "initdb")
	var uid, gid int
	out, err := exec.Command("id", "-u", "postgres").Output()
	if err == nil {
		uid, err = strconv.Atoi(strings.TrimSpace(string(out)))
	}
	if out, gerr := exec.Command("id", "-g", "postgres").Output(); err == nil && gerr == nil {
		gid, err = strconv.Atoi(strings.TrimSpace(string(out)))
	}
	if err != nil {
		h.T.Skipf("there is no user postgres: %v", err)
	}
	data := filepath.Join(h.Dir, "pg")
	if err := os.Mkdir(data, 0o700); err != nil {
		h.T.Fatal(err)
	}
	(&account{"postgres", uid, gid}).own(h.T, data)
	cmd := exec.Command(initdb, "-D", data, "-U", "postgres", "-A", "trust", "-N", "--locale=C", "-E", "UTF8")
	cmd.Dir = data
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	if out, err := cmd.CombinedOutput(); err != nil {
		h.T.Fatalf("initdb: %v\n%s", err, out)
	}
	p := &postgres{workload: place(h, "postgres", path)}
	p.launch("postgres", quiet, server, "-D", data, "-h", "127.0.0.1", "-p", p.targetPort(), "-k", data, "-c", "fsync=off")
	daemontest.Wait(h.T, "PostgreSQL is ready", func() (bool, string) { // it listens before it accepts queries
		out, err := exec.Command("pg_isready", "-q", "-h", "127.0.0.1", "-p", p.port()).CombinedOutput()
		return err == nil, string(out)
	})
	p.inside = p.activity
	p.client(tool(h.T, "pgbench"), append(p.args(), "-i", "-q", "-s", "1")...)
	return p
}

// activity returns what PostgreSQL's sessions are doing and waiting for.
func (p *postgres) activity(ctx context.Context) string {
	out, _ := exec.CommandContext(ctx, "psql", append([]string{"-X", "-x", "-c",
		`select pid, backend_type, application_name, client_port, state, wait_event_type, wait_event, pg_blocking_pids(pid) as blocked_by,
			now() - xact_start as in_transaction, now() - query_start as in_query, query from pg_stat_activity`}, p.args()...)...).CombinedOutput()
	return string(out)
}

func (p *postgres) args() []string {
	return []string{"-h", "127.0.0.1", "-p", p.port(), "-U", "postgres", "postgres"}
}

// pgbench runs transactions, each of which inserts a row into the history table.
func (p *postgres) pgbench(clients, each int) {
	p.T.Helper()
	want := clients * each
	out := p.client(tool(p.T, "pgbench"), append([]string{"-n", "-c", strconv.Itoa(clients), "-t", strconv.Itoa(each)}, p.args()...)...)
	if !regexp.MustCompile(fmt.Sprintf(`(?s)actually processed: %d/%d\b.*failed transactions: 0 `, want, want)).MatchString(out) {
		p.T.Fatalf("pgbench says:\n%s", out)
	}
	p.sent += want
}

// pgbenchFor runs as many transactions as possible in a time. On a busy machine
// each takes long.
func (p *postgres) pgbenchFor(clients int, d time.Duration) {
	p.T.Helper()
	out := p.client(tool(p.T, "pgbench"), append([]string{"-n", "-c", strconv.Itoa(clients), "-T", strconv.Itoa(int(d.Seconds()))}, p.args()...)...)
	m := regexp.MustCompile(`(?s)actually processed: (\d+)\b.*failed transactions: 0 `).FindStringSubmatch(out)
	if m == nil {
		p.T.Fatalf("pgbench says:\n%s", out)
	}
	n, _ := strconv.Atoi(m[1])
	p.sent += n
}

func (p *postgres) query(sql string) string {
	p.T.Helper()
	return strings.TrimSpace(p.client("psql", append([]string{"-X", "-A", "-t", "-c", sql}, p.args()...)...))
}

// intact checks that the history contains every acknowledged transaction, and
// that all four tables have the same sum.
func (p *postgres) intact() {
	p.T.Helper()
	got := p.query(`select (select count(*) from pgbench_history),
		(select sum(delta) from pgbench_history) = (select sum(abalance) from pgbench_accounts),
		(select sum(delta) from pgbench_history) = (select sum(tbalance) from pgbench_tellers),
		(select sum(delta) from pgbench_history) = (select sum(bbalance) from pgbench_branches)`)
	if want := fmt.Sprintf("%d|t|t|t", p.sent); got != want {
		p.T.Errorf("the history says %s, want %s", got, want)
	}
	p.T.Logf("%d transactions acknowledged, all in the history, and the four sums agree", p.sent)
}

func (p *postgres) cycles(n int) {
	p.comeAndGo(n, func(int) { p.pgbench(3, 5) })
	p.hammer(func() { p.pgbenchFor(3, 3*time.Second) })
	p.intact()
}

func TestPostgresDirect(t *testing.T) {
	t.Parallel()
	postgresAt(start(t, nil), instance.PathDirect, 0).cycles(cycles(t))
}

func TestPostgresRelay(t *testing.T) {
	t.Parallel()
	postgresAt(start(t, nil), instance.PathRelay, 0).cycles(cycles(t))
}

// TestPostgresIdleSession checks that an idle session keeps the server running by
// default. With quiet-connection-after the server must sleep, and the session
// must then continue inside its transaction.
func TestPostgresIdleSession(t *testing.T) {
	t.Run("holds", func(t *testing.T) {
		t.Parallel()
		p := postgresAt(start(t, nil), instance.PathDirect, 0)
		s := p.session()
		s.ask("select 1")
		p.holdsWhileOpen()
		s.end()
		p.awaitState("paused")
	})
	t.Run("sleeps", func(t *testing.T) {
		t.Parallel()
		p := postgresAt(start(t, nil), instance.PathDirect, pauseAfter)
		s := p.session()
		s.send("create table notes (n int); begin")
		n := cycles(t)
		p.comeAndGo(n, func(c int) { s.send("insert into notes values (" + strconv.Itoa(c) + ")") })
		s.send("commit")
		if got := s.ask("select count(*) from notes"); got != strconv.Itoa(n) {
			t.Errorf("the transaction that slept %d times wrote %s rows", n, got)
		}
		s.end()
	})
}

// session is a running psql that stays connected.
type session struct {
	p   *postgres
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader // answers and errors
}

func (p *postgres) session() *session {
	cmd := exec.Command("psql", append([]string{"-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"}, p.args()...)...)
	s := &session{p: p, cmd: cmd}
	var err error
	if s.in, err = cmd.StdinPipe(); err != nil {
		p.T.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		p.T.Fatal(err)
	}
	s.out, cmd.Stderr = bufio.NewReader(out), cmd.Stdout
	if err := cmd.Start(); err != nil {
		p.T.Fatal(err)
	}
	return s
}

// ask runs a query whose result is one row, and returns it.
func (s *session) ask(sql string) string {
	s.p.T.Helper()
	if _, err := io.WriteString(s.in, sql+";\n"); err != nil {
		s.p.T.Fatalf("the session is gone: %v", err)
	}
	line := make(chan string, 1)
	go func() {
		l, err := s.out.ReadString('\n')
		if err != nil {
			l = "(" + err.Error() + ")"
		}
		line <- strings.TrimSpace(l)
	}()
	defer s.p.awaiting("psql: " + sql)()
	select {
	case l := <-line:
		return l
	case <-time.After(daemontest.WaitLimit):
		s.p.T.Fatalf("no answer to %q", sql)
		return ""
	}
}

// send runs statements that have no result and waits until they are done.
func (s *session) send(sql string) {
	s.p.T.Helper()
	if got := s.ask(sql + "; select 'done'"); got != "done" {
		s.p.T.Fatalf("%q: psql says %q", sql, got)
	}
}

func (s *session) end() {
	s.p.T.Helper()
	s.in.Close()
	if err := s.cmd.Wait(); err != nil {
		s.p.T.Errorf("psql ended with %v", err)
	}
}

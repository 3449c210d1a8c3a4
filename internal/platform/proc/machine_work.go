package proc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/idle"
)

// Names of the signals that a policy can add to the seven of every machine.
const (
	SignalProcesses  = "processes"
	SignalPorts      = "ports"
	SignalSessions   = "sessions"
	SignalInhibitors = "inhibitors"
)

// Profiles are the named lists of programs that researchers leave running
// unattended. A name with a dot or a space is searched for in the command line
// (python -m torch.distributed.run), any other in the name of the program.
var Profiles = map[string][]string{
	"ml-training": {"torchrun", "deepspeed", "accelerate", "horovodrun", "mpirun", "tensorboard", "nvidia-cuda-mps",
		"torch.distributed", "pytorch_lightning", "train.py", "axolotl", "llamafactory-cli"},
	"data-analysis": {"Rscript", "rsession", "R", "julia", "matlab", "MATLAB", "stata", "stata-mp", "sas", "spark-submit",
		"dask-worker", "dask worker", "snakemake", "nextflow", "papermill", "bwa", "samtools", "STAR", "gatk", "blastn", "plink2"},
}

// sessionServers are programs in which a user works through a browser: notebook
// kernels, R sessions, editor servers.
var sessionServers = []string{"ipykernel_launcher", "ipykernel", "jupyter-kernel", "rsession", "code-server", "vscode-server", "openvscode-server", "jupyter-lab", "jupyter-notebook", "jupyter-server"}

// Work reads the processes and sockets of the machine for the signals that a
// policy can add. The zero value reads the live machine. It is safe for
// concurrent use.
type Work struct {
	Root string

	mu   sync.Mutex
	last map[int]workSample // CPU of session servers at the last check
}

type workSample struct {
	start uint64
	ticks uint64
	at    time.Time
}

func (w *Work) path(name string) string {
	root := w.Root
	if root == "" {
		root = "/"
	}
	return filepath.Join(root, name)
}

// process is one process with its command line, words separated by spaces.
type process struct {
	pid     int
	program string // base name of the first word, or of the script an interpreter runs
	comm    string
	line    string
}

// processes lists all processes except kernel threads. A process that ends in
// the meantime is omitted.
func (w *Work) processes() ([]process, error) {
	names, err := os.ReadDir(w.path("proc"))
	if err != nil {
		return nil, fmt.Errorf("cannot list processes: %w", err)
	}
	var out []process
	for _, n := range names {
		pid, err := strconv.Atoi(n.Name())
		if err != nil {
			continue
		}
		b, err := readSome(w.path(filepath.Join("proc", n.Name(), "cmdline")), 4096)
		if err != nil || len(b) == 0 {
			if err == nil || missing(err) || errors.Is(err, unix.ESRCH) {
				continue
			}
			return nil, fmt.Errorf("cannot read process %d: %w", pid, err)
		}
		comm, _ := readSome(w.path(filepath.Join("proc", n.Name(), "comm")), 64)
		out = append(out, processOf(pid, b, comm))
	}
	return out, nil
}

// processOf parses a command line, whose words end in NUL.
func processOf(pid int, cmdline, comm []byte) process {
	words := strings.Split(strings.TrimRight(string(cmdline), "\x00"), "\x00")
	p := process{pid: pid, comm: string(bytes.TrimRight(comm, "\n")), line: strings.Join(words, " ")}
	p.program = programName(words[0])
	if strings.HasPrefix(p.program, "python") || p.program == "sh" || p.program == "bash" || p.program == "perl" || p.program == "node" {
		for _, word := range words[1:] {
			if strings.HasPrefix(word, "-") {
				continue
			}
			if !strings.ContainsAny(word, " \t\n;='\"()") { // text with such characters is program code, as after -c or -e
				p.program = programName(word)
			}
			break
		}
	}
	return p
}

// programName returns a program's name without its directory, and without text
// that a process appended by writing its own title. That text may contain
// anything, including passwords, and the name is shown and reported.
func programName(word string) string {
	word, _, _ = strings.Cut(word, " ")
	return filepath.Base(word)
}

func (p process) matches(name string) bool {
	if strings.ContainsAny(name, ". ") {
		return strings.Contains(p.line, name)
	}
	return p.program == name || p.comm == name
}

// Processes returns the reading of running programs. It is active while a program
// with one of the names, or of one of the profiles, runs. An unknown profile
// makes it unknown.
func (w *Work) Processes(now time.Time, names, profiles []string) idle.Reading {
	wanted := slices.Clone(names)
	for _, p := range profiles {
		list, ok := Profiles[p]
		if !ok {
			return idle.NotKnown(SignalProcesses, now, fmt.Sprintf("unknown profile %q", p))
		}
		wanted = append(wanted, list...)
	}
	all, err := w.processes()
	if err != nil {
		return idle.NotKnown(SignalProcesses, now, err.Error())
	}
	r := idle.Reading{Signal: SignalProcesses, State: idle.Quiet, Threshold: 1, Unit: "processes", At: now}
	for _, p := range all {
		if p.pid != os.Getpid() && slices.ContainsFunc(wanted, p.matches) {
			if r.Value++; r.Value == 1 {
				r.State, r.Detail = idle.Active, fmt.Sprintf("%s (pid %d)", p.program, p.pid)
			}
		}
	}
	return r
}

// Servers returns the reading of session servers. It is active if a Jupyter
// kernel, an R session or an editor's server uses more than one percent of a CPU;
// one that is only open does not count. The first reading of a process is
// unknown.
func (w *Work) Servers(now time.Time) idle.Reading {
	all, err := w.processes()
	if err != nil {
		return idle.NotKnown(SignalSessions, now, err.Error())
	}
	const percent = 1.0
	fsys := At(w.path("proc"))
	w.mu.Lock()
	defer w.mu.Unlock()
	old := w.last
	w.last = map[int]workSample{}
	r := idle.Reading{Signal: SignalSessions, State: idle.Quiet, Threshold: percent, Unit: "% of a CPU", At: now}
	fresh := ""
	for _, p := range all {
		if !slices.ContainsFunc(sessionServers, func(s string) bool { return p.matches(s) || strings.Contains(p.line, s) }) {
			continue
		}
		st, err := fsys.Stat(p.pid)
		if errors.Is(err, ErrGone) {
			continue
		}
		if err != nil {
			return idle.NotKnown(SignalSessions, now, err.Error())
		}
		s := workSample{start: st.Start, ticks: st.CPU(), at: now}
		w.last[p.pid] = s
		before, ok := old[p.pid]
		if span := now.Sub(before.at); ok && before.start == s.start && span > 0 {
			used := 100 * float64(s.ticks-min(before.ticks, s.ticks)) * fsys.Tick().Seconds() / span.Seconds()
			r.Window = idle.Duration(span)
			if used > r.Value {
				r.Value, r.Detail = used, fmt.Sprintf("%s (pid %d)", p.program, p.pid)
			}
			continue
		}
		fresh = fmt.Sprintf("%s (pid %d) is seen for the first time", p.program, p.pid)
	}
	switch {
	case r.Value >= percent:
		r.State = idle.Active
	case fresh != "":
		r.State, r.Detail = idle.Unknown, fresh
	case len(w.last) == 0:
		r.Detail = "no such server runs"
	}
	return r
}

// Ports returns the reading of connections to TCP ports. It is active while a
// client on another machine is connected to one of ports.
func (w *Work) Ports(now time.Time, ports []string) idle.Reading {
	wanted := map[uint16]bool{}
	for _, p := range ports {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil {
			return idle.NotKnown(SignalPorts, now, fmt.Sprintf("%q is not a port", p))
		}
		wanted[uint16(n)] = true
	}
	r := idle.Reading{Signal: SignalPorts, State: idle.Quiet, Threshold: 1, Unit: "connections", At: now}
	found := false
	for _, name := range []string{"proc/net/tcp", "proc/net/tcp6"} {
		b, err := readSome(w.path(name), machineFileMax)
		if missing(err) {
			continue
		}
		if err == nil {
			found = true
			err = parseTCP(b, func(c tcpLine) {
				if c.established && wanted[c.port] && !c.loopback {
					if r.Value++; r.Value == 1 {
						r.State, r.Detail = idle.Active, fmt.Sprintf("a client on port %d", c.port)
					}
				}
			})
		}
		if err != nil {
			return idle.NotKnown(SignalPorts, now, err.Error())
		}
	}
	if !found {
		return idle.NotKnown(SignalPorts, now, "the kernel does not list its connections")
	}
	return r
}

// tcpLine is one line, hence one socket, of /proc/net/tcp or tcp6.
type tcpLine struct {
	port        uint16
	established bool
	loopback    bool // the other end is on this machine's loopback
}

// parseTCP calls each for every socket in b.
func parseTCP(b []byte, each func(tcpLine)) error {
	line, rest := cutLine(b)
	if first, _ := cutField(line); string(first) != "sl" {
		return cannotParse("/proc/net/tcp", line)
	}
	for len(rest) > 0 {
		line, rest = cutLine(rest)
		if len(bytes.TrimSpace(line)) == 0 {
			continue
		}
		_, cols := cutField(line)
		local, cols := cutField(cols)
		remote, cols := cutField(cols)
		state, _ := cutField(cols)
		lc, rc := bytes.IndexByte(local, ':'), bytes.IndexByte(remote, ':')
		if lc < 8 || rc < 8 || len(state) != 2 {
			return cannotParse("/proc/net/tcp", line)
		}
		port, err := strconv.ParseUint(string(local[lc+1:]), 16, 16)
		if err != nil {
			return cannotParse("/proc/net/tcp", line)
		}
		each(tcpLine{port: uint16(port), established: string(state) == "01", loopback: isLoopback(remote[:rc])})
	}
	return nil
}

// isLoopback reports whether hex is a loopback address as the kernel writes it:
// words of four bytes in the machine's byte order, which is little endian on all
// supported machines.
func isLoopback(hex []byte) bool {
	const six = "00000000000000000000000001000000"
	const mapped = "0000000000000000FFFF0000"
	s := string(hex)
	if len(s) == 32 {
		if s == six {
			return true
		}
		if s[:24] != mapped {
			return false
		}
		s = s[24:]
	}
	return len(s) == 8 && s[6:] == "7F"
}

// Inhibiting returns the reading of logind's inhibitor locks. It is active while
// one against shutting down, sleeping or idling is held in block mode.
func (l *Logind) Inhibiting(ctx context.Context, now time.Time) idle.Reading {
	list, err := l.Inhibitors(ctx)
	if err != nil {
		return failed(SignalInhibitors, now, err)
	}
	r := idle.Reading{Signal: SignalInhibitors, State: idle.Quiet, Threshold: 1, Unit: "locks", Value: float64(len(list)), At: now}
	if len(list) > 0 {
		r.State, r.Detail = idle.Active, fmt.Sprintf("%s: %s", list[0].Who, list[0].Why)
	}
	return r
}

// readSome reads at most limit bytes of a file.
func readSome(path string, limit int) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	b := make([]byte, 0, min(limit, 16<<10))
	for len(b) < limit {
		if len(b) == cap(b) {
			b = slices.Grow(b, cap(b))
		}
		n, err := unix.Read(fd, b[len(b):min(cap(b), limit)])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, &os.PathError{Op: "read", Path: path, Err: err}
		}
		if n == 0 {
			break
		}
		b = b[:len(b)+n]
	}
	return b, nil
}

// ReadMemory returns the machine's total memory and the memory available to
// programs, in bytes.
func (w *Work) ReadMemory() (total, available uint64, err error) {
	b, err := readSome(w.path("proc/meminfo"), 64<<10)
	if err != nil {
		return 0, 0, err
	}
	return parseMeminfo(b)
}

func parseMeminfo(b []byte) (total, available uint64, err error) {
	found := 0
	for len(b) > 0 {
		var line []byte
		line, b = cutLine(b)
		name, rest := cutField(line)
		var into *uint64
		switch string(name) {
		case "MemTotal:":
			into = &total
		case "MemAvailable:":
			into = &available
		default:
			continue
		}
		kib, _, ok := cutUint(rest)
		if !ok || kib > 1<<53 {
			return 0, 0, cannotParse("/proc/meminfo", line)
		}
		*into = kib << 10
		found++
	}
	if found != 2 {
		return 0, 0, fmt.Errorf("cannot parse /proc/meminfo: %w", errMalformed)
	}
	return total, available, nil
}

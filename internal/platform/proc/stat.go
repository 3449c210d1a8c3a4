package proc

import (
	"bytes"
	"errors"
	"fmt"
	"time"
)

// Stat is one process or task as listed in /proc/PID/stat (proc_pid_stat(5)).
// Times are in clock ticks (FS.Tick).
type Stat struct {
	PID     int
	State   byte // R, S, D, T (stopped), t (traced), Z, X, I and others
	PPID    int
	PGRP    int
	Session int
	UTime   uint64
	STime   uint64
	CUTime  uint64 // of reaped children, including their reaped children
	CSTime  uint64
	Threads int
	Start   uint64 // ticks since boot
	RSS     int64  // pages
	Kernel  bool   // a thread of the kernel
}

// kernelThread is the kernel's PF_KTHREAD.
const kernelThread = 0x00200000

// Ended reports whether the process has exited and waits to be reaped.
func (s Stat) Ended() bool { return s.State == 'Z' || s.State == 'X' || s.State == 'x' }

// CPU returns the time used by the process and its reaped children, in ticks.
func (s Stat) CPU() uint64 { return s.UTime + s.STime + s.CUTime + s.CSTime }

// Stat reads one process. It returns ErrGone if the process does not exist.
func (f *FS) Stat(pid int) (Stat, error) {
	s := f.scratch().num(pid).str("/stat")
	defer s.free()
	return s.stat()
}

func (s *scratch) stat() (Stat, error) {
	b, err := s.read()
	if err != nil {
		return Stat{}, err
	}
	st, err := parseStat(b)
	if err != nil {
		return Stat{}, s.fail(err)
	}
	return st, nil
}

var errStat = errors.New("not a process status line")

// parseStat parses a stat line. The name in parentheses may itself contain
// spaces, parentheses and newlines, so it ends at the last closing parenthesis.
func parseStat(b []byte) (Stat, error) {
	var st Stat
	pid, rest, ok := number(b)
	if !ok || pid > 1<<31 || len(rest) < 2 || rest[0] != ' ' || rest[1] != '(' {
		return Stat{}, errStat
	}
	st.PID = int(pid)
	end := bytes.LastIndexByte(rest, ')')
	if end < 0 {
		return Stat{}, errStat
	}
	word, rest := field(rest[end+1:])
	if len(word) != 1 {
		return Stat{}, errStat
	}
	st.State = word[0]
	const (
		first = 4 // number of the field after the state
		last  = 24
	)
	var values [last + 1]int64
	for i := first; i <= last; i++ {
		word, rest = field(rest)
		n, left, ok := signed(word)
		if !ok || len(left) != 0 {
			return Stat{}, fmt.Errorf("field %d of the process status line is not a number", i)
		}
		values[i] = n
	}
	st.PPID, st.PGRP, st.Session = int(values[4]), int(values[5]), int(values[6])
	st.UTime, st.STime = atLeast0(values[14]), atLeast0(values[15])
	st.CUTime, st.CSTime = atLeast0(values[16]), atLeast0(values[17])
	st.Threads = int(values[20])
	st.Start = atLeast0(values[22])
	st.RSS = values[24]
	st.Kernel = values[9]&kernelThread != 0
	return st, nil
}

func atLeast0(n int64) uint64 { return uint64(max(n, 0)) }

// Task is one thread of a process.
type Task struct {
	TID   int
	State byte
}

// Still reports whether the task cannot run: it is stopped by a signal, held by
// a tracer, or ended.
func (t Task) Still() bool {
	switch t.State {
	case 'T', 't', 'Z', 'X', 'x':
		return true
	}
	return false
}

// Busy reports whether the task runs, waits for a CPU, or waits for a disk.
func (t Task) Busy() bool { return t.State == 'R' || t.State == 'D' }

// Tasks reads the state of every thread of a process. Threads that end in the
// meantime are omitted. A process without threads yields ErrGone.
func (f *FS) Tasks(pid int) ([]Task, error) {
	tids, err := f.tids(nil, pid)
	if err != nil {
		return nil, err
	}
	tasks := make([]Task, 0, len(tids))
	s := f.scratch()
	defer s.free()
	base := len(s.num(pid).str("/task").path)
	for _, tid := range tids {
		s.path = s.path[:base]
		st, err := s.num(tid).str("/stat").stat()
		if errors.Is(err, ErrGone) {
			continue
		}
		if err != nil {
			return nil, err
		}
		tasks = append(tasks, Task{TID: tid, State: st.State})
	}
	if len(tasks) == 0 {
		s.path = s.path[:base]
		return nil, &Error{Path: string(s.path), Err: ErrGone}
	}
	return tasks, nil
}

// tids appends the thread ids of pid to into.
func (f *FS) tids(into []int, pid int) ([]int, error) {
	s := f.scratch().num(pid).str("/task")
	defer s.free()
	err := s.numbers(func(n int) bool { into = append(into, n); return true })
	return into, err
}

// BootID returns the kernel's random id of this boot.
func (f *FS) BootID() (string, error) {
	s := f.scratch().str("/sys/kernel/random/boot_id")
	defer s.free()
	b, err := s.read()
	if err != nil {
		return "", err
	}
	id, err := parseBootID(b)
	if err != nil {
		return "", s.fail(err)
	}
	return id, nil
}

func parseBootID(b []byte) (string, error) {
	b = bytes.TrimSpace(b)
	if len(b) != 36 {
		return "", errors.New("not a boot id")
	}
	for i, c := range b {
		dash := i == 8 || i == 13 || i == 18 || i == 23
		hex := '0' <= c && c <= '9' || 'a' <= c && c <= 'f'
		if dash != (c == '-') || !dash && !hex {
			return "", errors.New("not a boot id")
		}
	}
	return string(b), nil
}

// TreeCPU returns the CPU time of pids and their reaped children. A pid that has
// ended adds nothing. The time of such a process is lost unless a process in pids
// reaped it, so the sum of a tree can decrease between calls. Callers should
// compare per pid or, better, read the cgroup.
func (f *FS) TreeCPU(pids []int) (time.Duration, error) {
	var ticks uint64
	for _, pid := range pids {
		st, err := f.Stat(pid)
		if errors.Is(err, ErrGone) {
			continue
		}
		if err != nil {
			return 0, err
		}
		ticks += st.CPU()
	}
	return time.Duration(ticks) * f.tick, nil
}

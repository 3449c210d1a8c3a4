package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// files runs a file operation and reports the outcome.
func files(args []string) {
	out, err := fileOrder(args)
	if err != nil {
		var no syscall.Errno
		if errors.As(err, &no) {
			fmt.Printf("errno %d %s\n", no, no)
		} else {
			fmt.Println(err)
		}
		os.Exit(1)
	}
	fmt.Println(out)
}

func fileOrder(a []string) (string, error) {
	num := func(n int) int { v, _ := strconv.Atoi(a[n]); return v }
	switch a[0] {
	case "put":
		return "", os.WriteFile(a[1], []byte(a[2]), 0o644)
	case "get":
		b, err := os.ReadFile(a[1])
		return string(b), err
	case "many": // n files in a directory
		for n := range num(2) {
			if err := os.WriteFile(fmt.Sprintf("%s/f%04d", a[1], n), []byte(strconv.Itoa(n)), 0o644); err != nil {
				return "", err
			}
		}
		return "", nil
	case "ls":
		l, err := os.ReadDir(a[1])
		return fmt.Sprintln(len(l)), err
	case "rmrf":
		return "", os.RemoveAll(a[1])
	case "mv":
		return "", os.Rename(a[1], a[2])
	case "ln":
		return "", os.Symlink(a[1], a[2])
	case "hardlink":
		return "", os.Link(a[1], a[2])
	case "chmod":
		m, _ := strconv.ParseUint(a[2], 8, 32)
		return "", syscall.Chmod(a[1], uint32(m))
	case "mkdir":
		return "", os.Mkdir(a[1], 0o755)
	case "mknod":
		m, _ := strconv.ParseUint(a[2], 8, 32)
		return "", syscall.Mknod(a[1], uint32(m), 1<<8|3)
	case "chown":
		return "", os.Chown(a[1], num(2), num(2))
	case "truncate":
		return "", os.Truncate(a[1], int64(num(2)))
	case "stat":
		var st syscall.Stat_t
		err := syscall.Lstat(a[1], &st)
		return fmt.Sprintf("%o uid %d gid %d size %d links %d", st.Mode, st.Uid, st.Gid, st.Size, st.Nlink), err
	case "fill": // a file of that many bytes from a seed, synced
		f, err := os.Create(a[1])
		if err != nil {
			return "", err
		}
		sum := sha256.New()
		var seed [32]byte
		copy(seed[:], a[3])
		_, err = io.CopyN(io.MultiWriter(f, sum), rand.NewChaCha8(seed), int64(num(2)))
		return fmt.Sprintf("%x", sum.Sum(nil)), errors.Join(err, f.Sync(), f.Close())
	case "bulk": // as many bytes, not synced
		f, err := os.Create(a[1])
		if err != nil {
			return "", err
		}
		for n := 0; n < num(2); n += 1 << 20 {
			if _, err := f.Write(make([]byte, 1<<20)); err != nil {
				return "", errors.Join(err, f.Close())
			}
		}
		return "", f.Close()
	case "sum":
		b, err := os.ReadFile(a[1])
		return fmt.Sprintf("%x", sha256.Sum256(b)), err
	case "exec": // a program in the directory, executed with that directory
		return "", syscall.Exec(filepath.Join(a[1], a[2]), a[2:], os.Environ())
	}
	return "", fmt.Errorf("there is no order %q", a[0])
}

var churning struct {
	stop, over chan struct{}
	rounds     int
	err        error
}

// churn creates, renames and removes files in a directory until it is told
// "off". Every operation must succeed, and once.
func churn(arg string) string {
	c := &churning
	if arg != "off" {
		c.stop, c.over = make(chan struct{}), make(chan struct{})
		go func() {
			defer close(c.over)
			log, err := os.OpenFile(arg+"/log", os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o444)
			for c.err = err; c.err == nil; c.rounds++ {
				select {
				case <-c.stop:
					c.err = log.Close()
					return
				default:
					c.err = round(arg, log, c.rounds)
				}
			}
		}()
		return "churning\n"
	}
	close(c.stop)
	<-c.over
	return fmt.Sprintf("%d rounds, %v\n", c.rounds, c.err)
}

// round leaves one file and a line in the log.
func round(in string, log *os.File, n int) error {
	dir, f, to := fmt.Sprintf("%s/d%d", in, n), fmt.Sprintf("%s/d%d/f", in, n), fmt.Sprintf("%s/f%d", in, n)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(f, []byte(strconv.Itoa(n)), 0o644); err != nil {
		return err
	}
	if err := os.Symlink("f", dir+"/s"); err != nil {
		return err
	}
	if err := os.Link(f, dir+"/l"); err != nil {
		return err
	}
	if err := os.Rename(f, to); err != nil {
		return err
	}
	for _, name := range []string{dir + "/s", dir + "/l"} {
		if err := syscall.Unlink(name); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	if err := syscall.Rmdir(dir); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	_, err := fmt.Fprintln(log, n)
	return errors.Join(err, log.Sync())
}

var kept *os.File

// keep reads and writes one file that stays open.
func keep(arg string) string {
	word, arg, _ := strings.Cut(arg, " ")
	var err error
	out := "done"
	switch word {
	case "open":
		kept, err = os.OpenFile(arg, os.O_CREATE|os.O_RDWR, 0o444)
	case "append":
		if _, err = kept.Seek(0, io.SeekEnd); err == nil {
			_, err = io.WriteString(kept, arg)
		}
		err = errors.Join(err, kept.Sync())
	case "read":
		var b []byte
		if _, err = kept.Seek(0, io.SeekStart); err == nil {
			b, err = io.ReadAll(kept)
		}
		out = string(b)
	case "remove":
		err = os.Remove(arg)
	case "close":
		err = kept.Close()
	}
	if err != nil {
		out = err.Error()
	}
	return out + "\n"
}

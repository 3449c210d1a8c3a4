// Command guest is the program that the tests of the host daemon run as
// instances. Its first argument selects what it does.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) < 2 {
		fail(errors.New("cannot run: want what to do"))
	}
	args := os.Args[2:]
	switch os.Args[1] {
	case "serve":
		serve(args)
	case "poll":
		poll(args[0], duration(args[1]))
	case "tick":
		for {
			time.Sleep(duration(args[0]))
		}
	case "burn":
		burn(args)
	case "record":
		record(args[0], duration(args[1]))
	case "exit":
		time.Sleep(duration(args[1]))
		code, _ := strconv.Atoi(args[0])
		os.Exit(code)
	case "spam":
		spam(args)
	case "mem":
		memory(args[0])
	case "mapped":
		mapped(args[0])
	default:
		fail(fmt.Errorf("cannot do %q", os.Args[1]))
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(2)
}

func duration(s string) time.Duration {
	d, err := time.ParseDuration(s)
	if err != nil {
		fail(err)
	}
	return d
}

func forever() {
	for {
		time.Sleep(time.Hour)
	}
}

// record regularly appends a line to a file and syncs it, until it receives
// SIGHUP.
func record(path string, every time.Duration) {
	enough := make(chan os.Signal, 1)
	signal.Notify(enough, syscall.SIGHUP)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		fail(err)
	}
	for {
		select {
		case <-enough:
			forever()
		case now := <-time.After(every):
			_, err := fmt.Fprintln(f, now)
			if err = errors.Join(err, f.Sync()); err != nil {
				fail(err)
			}
		}
	}
}

// poll keeps one connection to addr and sends a request at an interval.
func poll(addr string, every time.Duration) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		fail(err)
	}
	b := make([]byte, 64)
	for {
		if _, err := c.Write([]byte("anything new?\n")); err != nil {
			fail(err)
		}
		if _, err := c.Read(b); err != nil {
			fail(err)
		}
		time.Sleep(every)
	}
}

// burn DEPTH [detach] FOR computes in the last of DEPTH generations of
// children, which leaves its session if requested, while the others sleep.
func burn(args []string) {
	depth, _ := strconv.Atoi(args[0])
	if depth == 0 {
		// Raise its priority if permitted, so that it gets CPU time on a busy
		// machine, too.
		_ = syscall.Setpriority(syscall.PRIO_PROCESS, 0, -5)
		for end := time.Now().Add(duration(args[len(args)-1])); time.Now().Before(end); {
			n := 0
			for i := range 1_000_000 {
				n += i
			}
		}
		return
	}
	cmd := exec.Command(os.Args[0], append([]string{"burn", strconv.Itoa(depth - 1)}, args[1:]...)...)
	if args[1] == "detach" {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			fail(err)
		}
		if depth == 1 {
			os.Exit(0) // the last generation is an orphan
		}
		go cmd.Wait()
		forever()
	}
	if err := cmd.Run(); err != nil {
		fail(err)
	}
	forever()
}

// spam prints N lines of a hundred bytes, then sleeps.
func spam(args []string) {
	n, _ := strconv.Atoi(args[0])
	w := bufio.NewWriter(os.Stdout)
	for i := range n {
		fmt.Fprintf(w, "%08d %s\n", i, strings.Repeat("x", 90))
	}
	w.Flush()
	fmt.Println("the last line")
	forever()
}

func memory(megabytes string) {
	n, _ := strconv.Atoi(megabytes)
	b := make([]byte, n<<20)
	for i := 0; i < len(b); i += 512 {
		b[i] = byte(i)
	}
	forever()
	fmt.Println(b[0])
}

// mapped reads every page of a file that it maps.
func mapped(path string) {
	f, err := os.Open(path)
	if err != nil {
		fail(err)
	}
	st, err := f.Stat()
	if err != nil {
		fail(err)
	}
	b, err := syscall.Mmap(int(f.Fd()), 0, int(st.Size()), syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		fail(err)
	}
	sum := 0
	for i := 0; i < len(b); i += 512 {
		sum += int(b[i])
	}
	fmt.Println("mapped", sum)
	forever()
}

// server answers lines.
type server struct {
	mu     sync.Mutex
	lns    []net.Listener
	guest  net.Conn // to LULL_SOCKET
	replay *bufio.Reader
	term   string
}

func serve(args []string) {
	f := flag.NewFlagSet("serve", flag.ExitOnError)
	listen := f.String("listen", "", "addresses, comma between them")
	reuse := f.Int("reuse", 0, "workers that each open the port with SO_REUSEPORT")
	prefork := f.Int("prefork", 0, "workers that share this process's listener")
	inherited := f.Int("inherited", 0, "descriptor of an inherited listener")
	fds := f.Bool("fds", false, "serve the sockets of LISTEN_FDS")
	term := f.String("term", "", "file that is written at SIGTERM")
	linger := f.Duration("linger", 0, "how long it takes to exit after SIGTERM, without listening")
	say := f.String("say", "", "message for LULL_SOCKET at the start")
	if err := f.Parse(args); err != nil {
		fail(err)
	}
	if *reuse > 0 {
		workers(*reuse, nil, "-reuse", "-1", "-listen", *listen)
	}
	s := &server{term: *term}
	switch {
	case *fds:
		if os.Getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
			fail(fmt.Errorf("cannot serve: LISTEN_PID is %q, the process is %d", os.Getenv("LISTEN_PID"), os.Getpid()))
		}
		n, _ := strconv.Atoi(os.Getenv("LISTEN_FDS"))
		for fd := 3; fd < 3+n; fd++ {
			s.take(fd)
		}
	case *inherited > 0:
		s.take(*inherited)
	default:
		for _, a := range strings.Split(*listen, ",") {
			s.listen(a, *reuse < 0)
		}
	}
	if *prefork > 0 {
		file, err := s.lns[0].(*net.TCPListener).File()
		if err != nil {
			fail(err)
		}
		workers(*prefork, file, "-inherited", "3")
	}
	if *say != "" {
		fmt.Println(s.say(*say))
	}
	if *linger > 0 {
		ch := make(chan os.Signal, 1)
		signal.Notify(ch, syscall.SIGTERM)
		go func() {
			<-ch
			for _, ln := range s.lns {
				ln.Close()
			}
			time.Sleep(*linger)
			os.Exit(0)
		}()
	}
	if *term != "" {
		ch := make(chan os.Signal, 1)
		signal.Notify(ch, syscall.SIGTERM)
		go func() {
			<-ch
			if err := os.WriteFile(*term, []byte("ended in order\n"), 0o600); err != nil {
				fail(err)
			}
			os.Exit(0)
		}()
	}
	forever()
}

// workers starts n copies of this program and waits.
func workers(n int, ln *os.File, args ...string) {
	for range n {
		cmd := exec.Command(os.Args[0], append([]string{"serve"}, args...)...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		if ln != nil {
			cmd.ExtraFiles = []*os.File{ln}
		}
		if err := cmd.Start(); err != nil {
			fail(err)
		}
		go cmd.Wait()
	}
	forever()
}

func (s *server) listen(addr string, reuse bool) {
	lc := net.ListenConfig{}
	if reuse {
		lc.Control = func(_, _ string, c syscall.RawConn) error {
			const soReusePort = 15
			var err error
			cerr := c.Control(func(fd uintptr) {
				err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, soReusePort, 1)
			})
			return errors.Join(err, cerr)
		}
	}
	ln, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		fail(err)
	}
	s.accept(ln)
}

func (s *server) take(fd int) {
	f := os.NewFile(uintptr(fd), "listener")
	ln, err := net.FileListener(f)
	if err != nil {
		fail(err)
	}
	f.Close()
	s.accept(ln)
}

func (s *server) accept(ln net.Listener) {
	s.mu.Lock()
	s.lns = append(s.lns, ln)
	s.mu.Unlock()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go s.answer(c.(*net.TCPConn))
		}
	}()
}

// answer replies to each line. At the client's end it reports how much it
// received.
func (s *server) answer(c *net.TCPConn) {
	defer c.Close()
	r := bufio.NewReaderSize(c, 1<<16)
	total := 0
	for {
		line, err := r.ReadString('\n')
		total += len(line)
		if errors.Is(err, io.EOF) {
			fmt.Fprintf(c, "end after %d\n", total)
			return
		}
		if err != nil {
			return
		}
		if _, err := io.WriteString(c, s.do(strings.TrimSuffix(line, "\n"))+"\n"); err != nil {
			return
		}
	}
}

func (s *server) do(line string) string {
	verb, rest, _ := strings.Cut(line, " ")
	switch verb {
	case "pid":
		return strconv.Itoa(os.Getpid())
	case "wait":
		time.Sleep(duration(rest))
		return "waited"
	case "sink":
		return ""
	case "say":
		return s.say(rest)
	case "hangup":
		s.guest.Close()
		s.guest = nil
		return "gone"
	case "reopen":
		s.mu.Lock()
		old := s.lns
		s.lns = nil
		s.mu.Unlock()
		for _, ln := range old {
			addr := ln.Addr().String()
			ln.Close()
			s.listen(addr, false)
		}
		return "open again"
	}
	return "echo " + line
}

// say sends one message over the connection to LULL_SOCKET, which stays open,
// and returns the answer.
func (s *server) say(message string) string {
	if s.guest == nil {
		c, err := net.Dial("unix", os.Getenv("LULL_SOCKET"))
		if err != nil {
			return err.Error()
		}
		s.guest, s.replay = c, bufio.NewReader(c)
	}
	if _, err := io.WriteString(s.guest, message+"\n"); err != nil {
		return err.Error()
	}
	answer, err := s.replay.ReadString('\n')
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(answer)
}

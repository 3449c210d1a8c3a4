package process_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// program runs the test program named by kind. It never returns.
func program(kind string, args []string) {
	var err error
	switch kind {
	case "echo": // one listener for each address
		err = each(args, func(a string) (net.Listener, error) { return net.Listen("tcp", a) })
	case "plain": // the same without Multipath TCP, which Go uses by default
		var c net.ListenConfig
		c.SetMultipathTCP(false)
		err = each(args, func(a string) (net.Listener, error) { return c.Listen(context.Background(), "tcp", a) })
	case "reuseport", "thoughtful": // four processes, each with its own listener
		err = workers(4, append([]string{kind + "-worker"}, args...), nil)
	case "reuseport-worker", "thoughtful-worker":
		if kind == "thoughtful-worker" {
			think = time.Millisecond
		}
		c := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
			var err error
			cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
			if err == nil {
				err = cerr
			}
			return err
		}}
		err = each(args, func(a string) (net.Listener, error) { return c.Listen(context.Background(), "tcp", a) })
	case "prefork": // the parent binds and closes the listener, four children accept
		var l net.Listener
		if l, err = net.Listen("tcp", args[0]); err == nil {
			var f *os.File
			if f, err = l.(*net.TCPListener).File(); err == nil {
				l.Close()
				err = workers(4, []string{"inherited", "3"}, f)
			}
		}
	case "inherited", "listenfds":
		n := 3
		if kind == "listenfds" && os.Getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
			err = fmt.Errorf("LISTEN_PID is %q, this is process %d", os.Getenv("LISTEN_PID"), os.Getpid())
			break
		}
		count := 1
		if kind == "listenfds" {
			count, _ = strconv.Atoi(os.Getenv("LISTEN_FDS"))
		}
		err = each(make([]string, count), func(string) (net.Listener, error) {
			l, err := net.FileListener(os.NewFile(uintptr(n), "inherited"))
			n++
			return l, err
		})
	case "reopen": // reopens its listener at each SIGHUP
		reopen(args[0])
	case "hidden": // no other process may inspect it
		if err = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err == nil {
			err = each(args, func(a string) (net.Listener, error) { return net.Listen("tcp", a) })
		}
	case "mapped": // with file-backed memory
		if err = mapFile(os.Getenv("OUT")); err == nil {
			err = each(args, func(a string) (net.Listener, error) { return net.Listen("tcp", a) })
		}
	case "udp":
		err = udp(args[0])
	case "unix-to-itself": // has a connection to its own socket
		err = each(args, func(a string) (net.Listener, error) {
			l, err := net.Listen("unix", a)
			if err == nil {
				var c net.Conn
				c, err = net.Dial("unix", a)
				keptOpen = append(keptOpen, c)
			}
			return l, err
		})
	case "unix":
		err = each(args, func(a string) (net.Listener, error) { return net.Listen("unix", a) })
	}
	fmt.Fprintln(os.Stderr, "program ends:", err)
	os.Exit(1)
}

// keptOpen keeps connections open until the program ends.
var keptOpen []net.Conn

func each(addrs []string, listen func(string) (net.Listener, error)) error {
	errs := make(chan error)
	for _, a := range addrs {
		l, err := listen(a)
		if err != nil {
			return err
		}
		go func() { errs <- accept(l) }()
	}
	return <-errs
}

func accept(l net.Listener) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go echo(c)
	}
}

// think is how long the program works on each answer.
var think time.Duration

func echo(c net.Conn) {
	defer c.Close()
	in := bufio.NewReader(c)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		spin(think)
		if _, err := fmt.Fprintf(c, "%d %s", os.Getpid(), line); err != nil {
			return
		}
	}
}

func workers(n int, args []string, f *os.File) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	ends := make(chan error)
	for range n {
		cmd := exec.Command(self, append([]string{"program"}, args...)...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		if f != nil {
			cmd.ExtraFiles = []*os.File{f}
		}
		if err := cmd.Start(); err != nil {
			return err
		}
		go func() { ends <- cmd.Wait() }()
	}
	if f != nil {
		f.Close()
	}
	return <-ends
}

func reopen(addr string) {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	for {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println("open")
		go accept(l)
		<-hup
		l.Close()
	}
}

// mapped is the amount of file-backed memory of the program "mapped", in bytes.
const mapped = 32 << 20

func mapFile(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := f.Truncate(mapped); err != nil {
		return err
	}
	b, err := unix.Mmap(int(f.Fd()), 0, mapped, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	for i := 0; i < len(b); i += 4096 {
		b[i] = 1
	}
	return unix.Msync(b, unix.MS_SYNC)
}

func udp(addr string) error {
	c, err := net.ListenPacket("udp", addr)
	if err != nil {
		return err
	}
	buf := make([]byte, 1500)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return err
		}
		if _, err := c.WriteTo(buf[:n], from); err != nil {
			return err
		}
	}
}

// Command guest is the workload of the tests. Its first argument selects what
// it does.
package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"lull/internal/protocol/guest/vsock"
)

func main() {
	if len(os.Args) < 2 {
		os.Exit(2)
	}
	switch os.Args[1] {
	case "serve":
		serve(os.Args[2])
	case "exit":
		n, _ := strconv.Atoi(os.Args[2])
		fmt.Println("leaving with", n)
		os.Exit(n)
	case "flood":
		count := "/tmp/count"
		if len(os.Args) > 2 {
			count = os.Args[2]
		}
		for n := 0; ; n++ {
			fmt.Printf("line %d %s\n", n, strings.Repeat("x", 100))
			if n%1000 == 0 {
				os.WriteFile(count, []byte(strconv.Itoa(n)), 0o644)
			}
		}
	case "cat":
		b, err := os.ReadFile(os.Args[2])
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Stdout.Write(b)
	case "files":
		files(os.Args[2:])
	case "time":
		fmt.Println(time.Now().UnixNano())
	case "whoami":
		fmt.Println(os.Getuid(), os.Getgid())
	case "where":
		dir, _ := os.Getwd()
		groups, _ := os.Getgroups()
		fmt.Println(dir, groups, os.Getenv("FROM"), os.Getenv("ONLY"), os.Getenv("HOME"))
	case "write":
		if err := os.WriteFile(os.Args[2], []byte("by a guest"), 0o644); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("written")
	case "panic":
		if err := os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0); err != nil {
			fmt.Println(err)
		}
		select {}
	case "say":
		say(os.Args[2])
	case "dial":
		c, err := net.DialTimeout("tcp", os.Args[2], 10*time.Second)
		if err != nil {
			fmt.Println("refused:", err)
			os.Exit(1)
		}
		b, _ := io.ReadAll(c)
		fmt.Printf("got %s\n", b)
	case "connect":
		c, err := net.DialTimeout("tcp", os.Args[2], 10*time.Second)
		if err != nil {
			fmt.Println("refused:", err)
			os.Exit(1)
		}
		c.Close()
		fmt.Println("connected")
	case "vsock":
		overVsock(os.Args[2], os.Args[3])
	case "spin":
		for end := time.Now().Add(time.Second); time.Now().Before(end); {
		}
	}
}

// overVsock connects to a port of the host with a hexadecimal key.
func overVsock(port, key string) {
	n, err := strconv.ParseUint(port, 10, 32)
	b, kerr := hex.DecodeString(key)
	if err != nil || kerr != nil || len(b) != len(vsock.Key{}) {
		os.Exit(2)
	}
	c, err := vsock.Dial(context.Background(), vsock.Host, uint32(n), vsock.Key(b))
	if err != nil {
		fmt.Println("refused:", err)
		os.Exit(1)
	}
	c.Close()
	fmt.Println("connected")
}

// serve echoes lines on a port, in capitals at the end of the input. Some lines
// are orders.
func serve(addr string) {
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM) // before it can be seen listening
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("serving", addr)
	go func() {
		<-term
		fmt.Println("asked to end")
		os.Exit(7)
	}()
	for {
		c, err := ln.Accept()
		if err != nil {
			os.Exit(1)
		}
		go func() {
			defer c.Close()
			r, n := bufio.NewReader(c), 0
			for {
				line, err := r.ReadString('\n')
				if err != nil {
					fmt.Fprintf(c, "end after %d\n", n)
					return
				}
				n++
				if line == "crash\n" {
					os.Exit(42)
				}
				io.WriteString(c, order(line))
			}
		}()
	}
}

var (
	polled   net.Conn
	spinning atomic.Bool
	counted  atomic.Int64
	hoard    [][]byte
)

// order executes a line if it is an order and returns the answer. Otherwise it
// returns the line.
func order(line string) string {
	word, arg, _ := strings.Cut(strings.TrimSpace(line), " ")
	switch word {
	case "poll": // keeps an outbound connection open
		c, err := net.DialTimeout("tcp", arg, 10*time.Second)
		if err != nil {
			return err.Error() + "\n"
		}
		polled = c
		return "polling\n"
	case "time":
		return fmt.Sprintln(time.Now().UnixNano())
	case "unpoll":
		polled.Close()
		return "not polling\n"
	case "spin":
		if spinning.Swap(arg == "on") != (arg == "on") && arg == "on" {
			go func() {
				for spinning.Load() {
				}
			}()
		}
		return "spinning " + arg + "\n"
	case "churn": // works on files all the time
		return churn(arg)
	case "keep": // works on one open file
		return keep(arg)
	case "count":
		return fmt.Sprintln("counted", counted.Add(1))
	case "hog":
		for {
			b := make([]byte, 1<<20)
			for n := range b {
				b[n] = byte(n)
			}
			hoard = append(hoard, b)
		}
	}
	return line
}

func say(line string) {
	c, err := net.Dial("unix", os.Getenv("LULL_SOCKET"))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Fprintln(c, line)
	b, _ := bufio.NewReader(c).ReadString('\n')
	fmt.Print(b)
}

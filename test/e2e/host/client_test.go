package host

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"lull/internal/host/daemontest"
)

// client is a connection to the server of a guest program.
type client struct {
	net.Conn
	r *bufio.Reader
}

func dial(addr string) (*client, error) {
	c, err := net.DialTimeout("tcp", addr, daemontest.WaitLimit)
	if err != nil {
		return nil, err
	}
	if err := c.SetDeadline(time.Now().Add(daemontest.WaitLimit)); err != nil {
		return nil, err
	}
	return &client{c, bufio.NewReader(c)}, nil
}

func mustDial(t *testing.T, addr string) *client {
	t.Helper()
	c, err := dial(addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// ask sends one line and returns the answer.
func (c *client) ask(line string) (string, error) {
	if _, err := io.WriteString(c, line+"\n"); err != nil {
		return "", err
	}
	s, err := c.r.ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("no answer to %q: %w", line, err)
	}
	return strings.TrimSuffix(s, "\n"), nil
}

// echo sends a line and returns an error unless the server echoes it.
func (c *client) echo(line string) error {
	got, err := c.ask(line)
	if err == nil && got != "echo "+line {
		err = fmt.Errorf("sent %q, got %q", line, got)
	}
	return err
}

// once connects, sends a line, reads the answer and closes.
func once(addr, line string) (string, error) {
	c, err := dial(addr)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return c.ask(line)
}

// mustAnswer makes one exchange that must succeed, over a new connection.
func mustAnswer(t *testing.T, addr string) {
	t.Helper()
	if got, err := once(addr, "hello"); err != nil || got != "echo hello" {
		t.Fatalf("%s answered %q, %v", addr, got, err)
	}
}

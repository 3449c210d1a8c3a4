package etcdtest

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// Link is a loopback address that forwards connections to another. While shut, it
// behaves like a network that drops everything: old and new connections stay open
// but silent. Data sent in the meantime arrives when the link is opened.
type Link struct {
	target string
	l      net.Listener

	mu    sync.Mutex
	moved sync.Cond
	shut  func(from string) bool
	conns map[net.Conn]bool // nil after the link is closed
}

// NewLink opens a link to a host:port until the test ends.
func NewLink(t testing.TB, target string) *Link {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &Link{target: target, l: l, shut: func(string) bool { return false }, conns: map[net.Conn]bool{}}
	g.moved.L = &g.mu
	go g.accept()
	t.Cleanup(g.close)
	return g
}

// URL returns the URL of the link.
func (g *Link) URL() string { return "http://" + g.l.Addr().String() }

// Shut stops forwarding until Open.
func (g *Link) Shut() { g.set(func(string) bool { return true }) }

// Open resumes forwarding.
func (g *Link) Open() { g.set(func(string) bool { return false }) }

func (g *Link) set(shut func(from string) bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = shut
	g.moved.Broadcast()
}

func (g *Link) close() {
	_ = g.l.Close() // the test is over
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := range g.conns {
		_ = c.Close()
	}
	g.conns = nil
	g.moved.Broadcast()
}

func (g *Link) accept() {
	for {
		c, err := g.l.Accept()
		if err != nil {
			return
		}
		go g.pass(c)
	}
}

// pass forwards one connection.
func (g *Link) pass(in net.Conn) {
	defer in.Close()
	if !g.hold(in) {
		return
	}
	defer g.drop(in)
	head, err := header(in)
	if err != nil {
		return
	}
	from := sender(head)
	if !g.wait(from) {
		return
	}
	out, err := net.Dial("tcp", g.target)
	if err != nil {
		return
	}
	defer out.Close()
	if !g.hold(out) {
		return
	}
	defer g.drop(out)
	back := make(chan struct{})
	go func() {
		defer close(back)
		g.carry(in, out, from)
		_ = in.Close() // so that the other direction ends too
	}()
	if _, err := out.Write(head); err == nil {
		g.carry(out, in, from)
	}
	_ = out.Close()
	<-back
}

func (g *Link) hold(c net.Conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.conns == nil {
		_ = c.Close()
		return false
	}
	g.conns[c] = true
	return true
}

func (g *Link) drop(c net.Conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.conns, c)
}

// wait waits until the link is open for connections from the member from. It
// returns false if the link was closed.
func (g *Link) wait(from string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.conns != nil && g.shut(from) {
		g.moved.Wait()
	}
	return g.conns != nil
}

func (g *Link) carry(to, from net.Conn, name string) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if !g.wait(name) {
			return
		}
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// header reads the beginning of a connection: the complete header of an HTTP/1
// request, or whatever arrives first in another protocol.
func header(c net.Conn) ([]byte, error) {
	var head []byte
	buf := make([]byte, 4<<10)
	for {
		n, err := c.Read(buf)
		head = append(head, buf[:n]...)
		if err != nil {
			return nil, err
		}
		if bytes.Contains(head, []byte("\r\n\r\n")) || !bytes.Contains(head, []byte("HTTP/1.")) || len(head) > 64<<10 {
			return head, nil
		}
	}
}

// sender returns the member that sent a request between etcd's peers, in
// hexadecimal; "" if unknown.
func sender(head []byte) string {
	_, rest, ok := strings.Cut(string(head), "\r\nX-Server-From: ")
	if !ok {
		return ""
	}
	id, _, _ := strings.Cut(rest, "\r\n")
	return id
}

// Cut disconnects members from the other members. Without arguments it reconnects
// all of them. It does not affect clients; put a Link in front of a member for
// that.
func (c *Cluster) Cut(members ...int) {
	c.t.Helper()
	ids := c.ids()
	cut := map[string]bool{}
	for _, i := range members {
		cut[ids[i]] = true
	}
	for j, m := range c.members {
		self := cut[ids[j]]
		m.link.set(func(from string) bool { return self || cut[from] })
	}
}

// ids returns the ids of the members, in order, in hexadecimal.
func (c *Cluster) ids() []string {
	c.t.Helper()
	if c.known != nil {
		return c.known
	}
	res, err := http.Post(c.members[0].client+"/v3/cluster/member/list", "application/json", strings.NewReader("{}"))
	if err != nil {
		c.t.Fatal(err)
	}
	defer res.Body.Close()
	var list struct {
		Members []struct{ ID, Name string }
	}
	body, err := io.ReadAll(res.Body)
	if err == nil {
		err = json.Unmarshal(body, &list)
	}
	if err != nil {
		c.t.Fatalf("cannot list the members: %v: %s", err, body)
	}
	byName := map[string]string{}
	for _, m := range list.Members {
		id, err := strconv.ParseUint(m.ID, 10, 64)
		if err != nil {
			c.t.Fatal(err)
		}
		byName[m.Name] = strconv.FormatUint(id, 16)
	}
	for _, m := range c.members {
		c.known = append(c.known, byName[m.name])
	}
	return c.known
}

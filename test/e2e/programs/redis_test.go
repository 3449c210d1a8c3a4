package programs

import (
	"bufio"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
)

// redisConn implements just enough of the Redis protocol to count.
type redisConn struct {
	w *workload
	net.Conn
	r *bufio.Reader
}

func dialRedis(w *workload) *redisConn {
	w.T.Helper()
	c, err := net.DialTimeout("tcp", w.listen, daemontest.WaitLimit)
	if err != nil {
		w.T.Fatalf("cannot connect to Redis: %v", err)
	}
	return &redisConn{w, c, bufio.NewReader(c)}
}

// do sends an inline command and returns its integer or one-line reply.
func (c *redisConn) do(format string, args ...any) string {
	c.w.T.Helper()
	defer c.w.awaiting("Redis")()
	if err := c.SetDeadline(time.Now().Add(daemontest.WaitLimit)); err != nil {
		c.w.T.Fatal(err)
	}
	if _, err := fmt.Fprintf(c, format+"\r\n", args...); err != nil {
		c.w.T.Fatalf("cannot send to Redis: %v", err)
	}
	line, err := c.r.ReadString('\n')
	if err == nil && strings.HasPrefix(line, "$") && line != "$-1\r\n" {
		line, err = c.r.ReadString('\n')
	}
	if err != nil {
		c.w.T.Fatalf("Redis does not answer: %v", err)
	}
	if strings.HasPrefix(line, "-") {
		c.w.T.Fatalf("Redis says %s", line)
	}
	return strings.TrimSpace(strings.TrimPrefix(line, ":"))
}

func redisAt(h *daemontest.Host, path instance.Path, quiet time.Duration) *workload {
	server := installed(h.T, "redis-server", "redis-server", "/usr/bin/redis-server")
	installed(h.T, "redis-tools", "redis-benchmark")
	w := place(h, "redis", path)
	w.launch("", quiet, server, "--port", w.targetPort(), "--bind", "127.0.0.1", "--save", "", "--dir", w.Dir,
		"--appendonly", "yes", "--appendfilename", "log.aof", "--appenddirname", filepath.Base(w.Dir)+"-aof")
	return w
}

// benchmark runs redis-benchmark for n increments of one key.
func (w *workload) benchmark(clients, n int) {
	w.T.Helper()
	out := w.client("redis-benchmark", "-h", "127.0.0.1", "-p", w.port(), "-t", "incr", "-q",
		"-c", strconv.Itoa(clients), "-n", strconv.Itoa(n))
	if strings.Contains(strings.ToLower(out), "error") || !strings.Contains(out, "per second") {
		w.T.Fatalf("redis-benchmark says: %s", out)
	}
}

// benchmarkKey is the key that redis-benchmark increments.
const benchmarkKey = "counter:__rand_int__"

// redisCycles runs n cycles in which clients increment a counter, and checks that
// the counter contains every increment.
func redisCycles(w *workload, n int) {
	const clients, per, own = 8, 200, 25
	w.comeAndGo(n, func(cycle int) {
		if cycle%2 == 0 {
			w.benchmark(clients, per)
			return
		}
		var wg sync.WaitGroup
		for range clients {
			wg.Go(func() {
				c := dialRedis(w)
				defer c.Close()
				for range own {
					c.do("INCR own")
				}
			})
		}
		wg.Wait()
	})
	const loaded = 60_000
	w.hammer(func() { w.benchmark(clients, loaded) })
	c := dialRedis(w)
	defer c.Close()
	wantBench, wantOwn := (n+1)/2*per+loaded, n/2*clients*own
	if got := c.do("GET %s", benchmarkKey); got != strconv.Itoa(wantBench) {
		w.T.Errorf("redis-benchmark's counter is %s after %d increments", got, wantBench)
	}
	if got := c.do("GET own"); got != strconv.Itoa(wantOwn) {
		w.T.Errorf("the clients' counter is %s after %d increments", got, wantOwn)
	}
	w.T.Logf("%d increments acknowledged, none lost", wantBench+wantOwn)
}

func TestRedisDirect(t *testing.T) {
	t.Parallel()
	redisCycles(redisAt(start(t, nil), instance.PathDirect, 0), cycles(t))
}

func TestRedisRelay(t *testing.T) {
	t.Parallel()
	redisCycles(redisAt(start(t, nil), instance.PathRelay, 0), cycles(t))
}

func TestRedisOrdinaryUser(t *testing.T) {
	for _, path := range []instance.Path{instance.PathDirect, instance.PathRelay} {
		t.Run(string(path), func(t *testing.T) {
			t.Parallel()
			redisCycles(redisAt(start(t, ordinary(t)), path, 0), cycles(t))
		})
	}
}

// TestRedisIdleConnectionHolds checks that an idle connection keeps Redis running
// by default.
func TestRedisIdleConnectionHolds(t *testing.T) {
	for _, path := range []instance.Path{instance.PathDirect, instance.PathRelay} {
		t.Run(string(path), func(t *testing.T) {
			t.Parallel()
			w := redisAt(start(t, nil), path, 0)
			c := dialRedis(w)
			c.do("SET k v")
			w.holdsWhileOpen()
			c.Close()
			w.awaitState("paused")
		})
	}
}

// TestRedisQuietConnectionSleeps checks that with quiet-connection-after an idle
// connection does not keep Redis running, that it stays open through the pause,
// and that its next byte wakes the program.
func TestRedisQuietConnectionSleeps(t *testing.T) {
	for _, path := range []instance.Path{instance.PathDirect, instance.PathRelay} {
		t.Run(string(path), func(t *testing.T) {
			t.Parallel()
			w := redisAt(start(t, nil), path, pauseAfter)
			idle := []*redisConn{dialRedis(w), dialRedis(w), dialRedis(w)}
			n := cycles(t)
			w.comeAndGo(n, func(c int) { idle[c%len(idle)].do("INCR k") })
			if got := idle[0].do("GET k"); got != strconv.Itoa(n) {
				t.Errorf("the counter is %s after %d increments over connections that slept", got, n)
			}
			for _, c := range idle {
				c.Close()
			}
		})
	}
}

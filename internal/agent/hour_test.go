package agent

import (
	"context"
	"encoding/json"
	"io/fs"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"

	"lull/internal/core/evidence"
	"lull/internal/lib/errtest"
	"lull/internal/platform/ec2"
	"lull/internal/platform/imds"
	"lull/internal/platform/journal"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/control"
	"lull/internal/sim"
	simworld "lull/internal/sim/world"
)

// wire counts the bytes that a client sends and receives.
type wire struct{ sent, received atomic.Int64 }

type countedConn struct {
	net.Conn
	w *wire
}

func (c countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.w.received.Add(int64(n))
	return n, err
}

func (c countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.w.sent.Add(int64(n))
	return n, err
}

// count makes w count the traffic of every connection of c.
func (w *wire) count(c *http.Client) *http.Client {
	t := c.Transport.(*http.Transport)
	dial := t.DialContext
	t.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return countedConn{conn, w}, nil
	}
	return c
}

// shelf keeps and counts everything that an agent writes: its files, history and
// evidence.
type shelf struct {
	MemoryJournal
	mu      sync.Mutex
	saved   int64 // total size of the files written
	saves   int
	entries []agentctl.Entry
	records []evidence.Record
	*world
}

func (s *shelf) Save(name string, b []byte) error {
	s.mu.Lock()
	s.saved, s.saves = s.saved+int64(len(b)), s.saves+1
	s.mu.Unlock()
	return s.world.Save(name, b)
}

func (s *shelf) Append(e agentctl.Entry) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.entries = append(s.entries, e)
	return nil
}

func (s *shelf) Take(r evidence.Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records = append(s.records, r)
}

func (s *shelf) Read(context.Context, evidence.Query, func(evidence.Record) error) ([]evidence.Missing, error) {
	return nil, nil
}

// toServer is a Reporter over a client of a real server.
type toServer struct{ c *control.Client }

func (r toServer) Report(ctx context.Context, x control.AgentReport) (control.AgentAnswer, error) {
	return r.c.Report(ctx, "m", x)
}

// TestHour runs an agent on an instance for an hour, in use every other ten minutes,
// with the real clients of metadata, EC2 and server. It checks how much the agent
// sends and writes; make bench-agent prints the figures.
func TestHour(t *testing.T) {
	var cloud, server wire
	var kept *shelf
	var reports atomic.Int64
	synctest.Test(t, func(t *testing.T) {
		s, err := sim.New(sim.Options{Metadata: "m", Scenario: simworld.Config{Regions: []simworld.RegionConfig{{Name: "us-east-1"}},
			Workers: []simworld.WorkerConfig{{Name: "m", Region: "us-east-1", Image: "ami-0000000000000d012", TagsInMetadata: true,
				Tags: map[string]string{"lull:idle-timeout": "2h", "lull:hibernate-on-idle": "true"}}}}})
		errtest.None(t, err)
		aws1 := cloud.count(serveInMemory(t, s.Handler()))
		api := server.count(serveInMemory(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			reports.Add(1)
			json.NewEncoder(w).Encode(control.AgentAnswer{WorkerID: "w-1", Holder: holderAgent})
		})))
		client, err := control.NewClient("http://server", "a-token-of-usual-length-0123456789", api)
		errtest.None(t, err)
		id := idOf(t, s, "m")
		e := EC2{ID: id, Client: ec2.New(aws.Config{Region: "us-east-1", HTTPClient: aws1,
			Credentials: credentials.NewStaticCredentialsProvider("AKIASIM", "secret", "")}, "http://cloud", ec2.Limits{})}
		w := newWorld()
		kept = &shelf{world: w}
		var slow []Slow
		for _, name := range []string{"users", "recent", "gpu"} {
			slow = append(slow, slowSignal{w, name})
		}
		a, err := New(Options{InstanceID: id, BootID: "b", Cheap: w, Slow: slow, Tags: []TagSource{imds.New(imds.Options{Endpoint: "http://127.0.0.1", HTTP: aws1}), e},
			Cloud: e, Disk: kept, Journal: kept, Evidence: kept, Reporter: toServer{client}, Clocks: w.clocks, Own: w.own})
		errtest.None(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- a.Run(ctx) }()
		<-a.Ready()
		for i := range 6 {
			w.with(func() { w.busy["cpu"] = i%2 == 1 })
			time.Sleep(10 * time.Minute)
		}
		cancel()
		errtest.None(t, <-ended)
		aws1.CloseIdleConnections()
		api.CloseIdleConnections()
	})
	written := kept.saved + onDisk(t, kept)
	t.Logf("in an hour: sent %d bytes to the cloud and %d to the server in %d reports (without TLS), received %d; wrote %d bytes, %d of them in %d whole files",
		cloud.sent.Load(), server.sent.Load(), reports.Load(), cloud.received.Load()+server.received.Load(), written, kept.saved, kept.saves)
	if n := cloud.sent.Load() + server.sent.Load(); n == 0 || n > 500e3 {
		t.Errorf("%d bytes were sent in an hour", n)
	}
	if written == 0 || written > 100e3 {
		t.Errorf("%d bytes were written in an hour", written)
	}
}

// onDisk writes the stored records to real journals and returns their size on disk.
func onDisk(t *testing.T, s *shelf) (size int64) {
	t.Helper()
	dir := t.TempDir()
	history, _, err := OpenJournal(filepath.Join(dir, "history"))
	errtest.None(t, err)
	for _, e := range s.entries {
		errtest.None(t, history.Append(e))
	}
	errtest.None(t, history.Close())
	looks, _, err := journal.Open(filepath.Join(dir, "evidence"), journal.Options{MaxBytes: 64 << 20, SyncEvery: 15 * time.Minute})
	errtest.None(t, err)
	for _, r := range s.records {
		looks.Take(r)
	}
	errtest.None(t, looks.Close())
	replays(t, filepath.Join(dir, "evidence"))
	errtest.None(t, filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		st, err := d.Info()
		if err == nil {
			size += st.Size()
		}
		return err
	}))
	return size
}

// replays checks that the checks of the hour, read back from disk, give the recorded
// verdicts.
func replays(t *testing.T, dir string) {
	t.Helper()
	j, damage, err := journal.Open(dir, journal.Options{})
	if err != nil || len(damage) > 0 {
		t.Fatal(damage, err)
	}
	defer j.Close()
	n := 0
	_, err = j.Read(t.Context(), evidence.Query{To: time.Now()}, func(r evidence.Record) error {
		n++
		return r.Decision.Replay()
	})
	if err != nil || n < 6 {
		t.Errorf("%d records of an hour, %v", n, err)
	}
	t.Logf("%d records, each replays to its verdict", n)
}

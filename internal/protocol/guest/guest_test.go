package guest

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"time"
)

type pipe struct {
	io.Reader
	bytes.Buffer
}

func (p *pipe) Read(b []byte) (int, error) { return p.Reader.Read(b) }

func serve(t *testing.T, in string, do func(Message) error) string {
	t.Helper()
	p := &pipe{Reader: strings.NewReader(in)}
	if err := Serve(p, do); err != nil {
		t.Fatalf("%q: %v", in, err)
	}
	return p.Buffer.String()
}

// TestSeedMessages checks the documented example messages.
func TestSeedMessages(t *testing.T) {
	var got []Message
	out := serve(t, `{"jsonrpc":"2.0","method":"activity","params":{"tcp":3,"cpu_ms":120,"net_bytes":4096}}
{"jsonrpc":"2.0","method":"keepalive","params":{"ttl_ms":30000,"reason":"build"}}
{"jsonrpc":"2.0","method":"keepalive.release","params":{}}
`, func(m Message) error { got = append(got, m); return nil })
	if out != "" {
		t.Errorf("notifications were answered: %s", out)
	}
	if len(got) != 3 || got[0].Params.TCP != 3 || got[0].Params.CPU != 120*time.Millisecond || got[0].Params.NetBytes != 4096 ||
		got[1].Params.TTL != 30*time.Second || got[1].Params.Reason != "build" || got[2].Method != KeepaliveRelease {
		t.Errorf("got %+v", got)
	}
}

func TestAnswers(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{`{"jsonrpc":"2.0","id":1,"method":"busy"}`, `"ok":true`},
		{`{"jsonrpc":"2.0","id":"a","method":"waiting","params":null}`, `"id":"a"`},
		{`{"jsonrpc":"2.0","id":1,"method":"keepalive","params":{"ttl_ms":0}}`, "ttl_ms"},
		{`{"jsonrpc":"2.0","id":1,"method":"keepalive","params":{}}`, "ttl_ms"},
		{`{"jsonrpc":"2.0","id":1,"method":"keepalive","params":{"ttl_ms":86400001}}`, "ttl_ms"},
		{`{"jsonrpc":"2.0","id":1,"method":"keepalive","params":{"ttl_ms":"1"}}`, "-32602"},
		{`{"jsonrpc":"2.0","id":1,"method":"next_due","params":{}}`, "either at or in_ms"},
		{`{"jsonrpc":"2.0","id":1,"method":"next_due","params":{"in_ms":5}}`, "ok"},
		{`{"jsonrpc":"2.0","id":1,"method":"reboot"}`, "-32601"},
		{`{"jsonrpc":"1.0","id":1,"method":"busy"}`, "-32600"},
		{`{"jsonrpc":"2.0","id":{},"method":"busy"}`, ""},
		{`{"jsonrpc":"2.0","id":1,"method":"busy","extra":1}`, "-32700"},
		{`not json`, "-32700"},
	} {
		out := serve(t, c.in+"\n", func(Message) error { return nil })
		if !strings.Contains(out, c.want) || c.want == "" && out != "" {
			t.Errorf("%s: answered %q, want %q in it", c.in, out, c.want)
		}
	}
	out := serve(t, `{"jsonrpc":"2.0","id":1,"method":"busy"}`, func(Message) error { return errors.New("stopped") })
	if !strings.Contains(out, "stopped") || !strings.Contains(out, "-32000") {
		t.Errorf("refusal: %s", out)
	}
}

func TestLineLimit(t *testing.T) {
	err := Serve(&pipe{Reader: strings.NewReader(strings.Repeat("x", MaxLine+1))}, nil)
	if err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("got %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"jsonrpc":"2.0","method":"activity","params":{"tcp":3,"cpu_ms":120,"net_bytes":4096}}`))
	f.Add([]byte(`{"jsonrpc":"2.0","id":9,"method":"keepalive","params":{"ttl_ms":30000,"holder":"x"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, bad := Decode(b)
		if bad == nil && m.Method == Keepalive && (m.Params.TTL <= 0 || m.Params.TTL > MaxTTL) {
			t.Fatalf("accepted a ttl of %v", m.Params.TTL)
		}
	})
}

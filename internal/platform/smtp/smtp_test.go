package smtp_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"mime"
	"net"
	"net/mail"
	"net/textproto"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"mime/quotedprintable"

	"lull/internal/lib/errtest"
	"lull/internal/platform/smtp"
)

// relay is a real SMTP server, aiosmtpd from Debian's python3-aiosmtpd.
type relay struct {
	address, ca string
	lines       *bufio.Scanner
}

func startRelay(t *testing.T) *relay {
	t.Helper()
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	const python = "/usr/bin/python3"
	if err := exec.Command(python, "-c", "import aiosmtpd").Run(); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("python3-aiosmtpd is not installed")
		}
		t.Skip("needs python3-aiosmtpd")
	}
	dir := t.TempDir()
	cert, key, ca := certificate(t, dir)
	cmd := exec.Command(python, "testdata/relay.py", cert, key, "0")
	out, err := cmd.StdoutPipe()
	errtest.None(t, err)
	var said bytes.Buffer
	cmd.Stderr = &said
	errtest.None(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // returns an error because it was killed
		if t.Failed() {
			t.Logf("the relay said: %s", said.String())
		}
	})
	r := &relay{ca: ca, lines: bufio.NewScanner(out)}
	if !r.lines.Scan() {
		t.Fatal("the relay does not start")
	}
	r.address = "127.0.0.1:" + r.lines.Text()
	return r
}

// certificate writes a self-signed certificate for 127.0.0.1.
func certificate(t *testing.T, dir string) (certFile, keyFile, ca string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	errtest.None(t, err)
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	errtest.None(t, err)
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	errtest.None(t, err)
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	pub := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for name, data := range map[string][]byte{certFile: pub, keyFile: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})} {
		errtest.None(t, os.WriteFile(name, data, 0o600))
	}
	return certFile, keyFile, string(pub)
}

func (r *relay) config() smtp.Config {
	return smtp.Config{Relay: r.address, CA: r.ca, Username: "lull", Password: "secret word", From: "lull@example.com", Dial: (&net.Dialer{}).DialContext}
}

type delivered struct {
	From string
	To   []string
	TLS  bool
	User string
	Data string
}

func (r *relay) next(t *testing.T) (delivered, *mail.Message, string) {
	t.Helper()
	if !r.lines.Scan() {
		t.Fatal("no mail arrived")
	}
	var d delivered
	errtest.None(t, json.Unmarshal(r.lines.Bytes(), &d))
	m, err := mail.ReadMessage(strings.NewReader(d.Data))
	errtest.None(t, err)
	body, err := io.ReadAll(quotedprintable.NewReader(m.Body))
	errtest.None(t, err)
	return d, m, strings.ReplaceAll(string(body), "\r\n", "\n")
}

var letter = smtp.Message{ID: "20261121T203000.1-ABC.0", Domain: "fleet 1", To: []string{"ada@example.com", "bob@example.com"},
	Subject: "w1 wird gestoppt: größer\r\nBcc: eve@example.com", Body: "One.\n.\nA line that is long: " + strings.Repeat("ä", 200) + "\n", Date: time.Unix(1_800_000_000, 0).UTC()}

// TestRealRelay sends mail to a real server over STARTTLS with a password, and
// checks what arrives. A refused recipient must not keep the others from getting
// the mail.
func TestRealRelay(t *testing.T) {
	r := startRelay(t)
	c, err := smtp.New(r.config())
	errtest.None(t, err)
	for range 2 { // the second time as if the first answer was lost
		errtest.None(t, c.Send(t.Context(), letter))
		d, m, body := r.next(t)
		subject, err := new(mime.WordDecoder).DecodeHeader(m.Header.Get("Subject"))
		if err != nil || subject != "w1 wird gestoppt: größer Bcc: eve@example.com" {
			t.Errorf("the subject is %q, %v", subject, err)
		}
		if !d.TLS || d.User != "lull" || d.From != "lull@example.com" || !slices.Equal(d.To, letter.To) || m.Header.Get("Bcc") != "" {
			t.Errorf("it arrived as %+v", d)
		}
		if id := m.Header.Get("Message-ID"); id != "<20261121T203000.1-ABC.0@fleet-1>" {
			t.Errorf("its id is %s", id)
		}
		if body != letter.Body {
			t.Errorf("its body is %q", body)
		}
	}
	bad := letter
	bad.To = []string{"refused@example.com"}
	if part, ok := errors.AsType[*smtp.Partly](c.Send(t.Context(), bad)); !ok || len(part.Refused) != 1 || !smtp.Rejected(part.Refused["refused@example.com"]) {
		t.Errorf("a mailbox that there is not: %v", part)
	}
	// A refused recipient does not keep the others from getting the mail.
	bad.To = []string{"refused@example.com", "ada@example.com", "later@example.com"}
	part, ok := errors.AsType[*smtp.Partly](c.Send(t.Context(), bad))
	if !ok || len(part.Refused) != 1 || part.Refused["refused@example.com"] == nil || len(part.Later) != 1 || part.Later["later@example.com"] == nil {
		t.Fatalf("two of three are refused: %+v", part)
	}
	if d, m, _ := r.next(t); !slices.Equal(d.To, []string{"ada@example.com"}) || !strings.Contains(m.Header.Get("To"), "refused@") {
		t.Errorf("it arrived as %+v", d)
	}
	bad.Only = []string{"later@example.com"}
	errtest.None(t, c.Send(t.Context(), bad))
	if d, _, _ := r.next(t); !slices.Equal(d.To, bad.Only) {
		t.Errorf("it arrived as %+v", d)
	}
	for what, change := range map[string]func(*smtp.Config){
		"wrong password":    func(c *smtp.Config) { c.Password = "wrong" },
		"unknown authority": func(c *smtp.Config) { c.CA = "" },
		"tls at once":       func(c *smtp.Config) { c.TLS = "tls" },
		"in the clear":      func(c *smtp.Config) { c.TLS, c.Username, c.Password = "none", "", "" },
	} {
		cfg := r.config()
		change(&cfg)
		c, err := smtp.New(cfg)
		errtest.None(t, err)
		if err := c.Send(t.Context(), letter); err == nil || smtp.Rejected(err) || strings.Contains(err.Error(), "wrong") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestNoSTARTTLS checks that a relay without STARTTLS receives neither password
// nor mail.
func TestNoSTARTTLS(t *testing.T) {
	got := make(chan string, 1)
	dial := func(context.Context, string, string) (net.Conn, error) {
		here, there := net.Pipe()
		go func() {
			c := textproto.NewConn(there)
			defer c.Close()
			var lines []string
			_ = c.PrintfLine("220 hello")
			for {
				line, err := c.ReadLine()
				if err != nil {
					got <- strings.Join(lines, "\n")
					return
				}
				lines = append(lines, line)
				_ = c.PrintfLine("250 fine")
			}
		}()
		return here, nil
	}
	c, err := smtp.New(smtp.Config{Relay: "relay:25", From: "a@b.example", Username: "u", Password: "secret word", Dial: dial})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Send(t.Context(), letter); err == nil || !strings.Contains(err.Error(), "STARTTLS") {
		t.Errorf("it was sent: %v", err)
	}
	if said := <-got; strings.Contains(said, "AUTH") || strings.Contains(said, "MAIL") {
		t.Errorf("it said %q", said)
	}
}

// TestSilentRelay checks that sending to a relay that never answers times out.
func TestSilentRelay(t *testing.T) {
	dial := func(context.Context, string, string) (net.Conn, error) {
		here, there := net.Pipe()
		t.Cleanup(func() { there.Close() })
		return here, nil
	}
	c, err := smtp.New(smtp.Config{Relay: "relay:25", From: "a@b.example", TLS: "none", Dial: dial, Timeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Send(t.Context(), letter); err == nil {
		t.Error("a relay that says nothing took a mail")
	}
}

// TestFaults checks that a message that cannot be sent is rejected before a
// connection is made.
func TestFaults(t *testing.T) {
	for _, cfg := range []smtp.Config{{Relay: "relay", From: "a@b"}, {Relay: "r:25", From: "no-address"}, {Relay: "r:25", From: "a@b", TLS: "maybe"},
		{Relay: "r:25", From: "a@b", TLS: "none", Username: "u", Password: "p"}, {Relay: "r:25", From: "a@b", CA: "no"}} {
		if _, err := smtp.New(cfg); err == nil {
			t.Errorf("%+v is taken", cfg)
		}
	}
	c, err := smtp.New(smtp.Config{Relay: "r:25", From: "a@b.example", Dial: func(context.Context, string, string) (net.Conn, error) {
		t.Error("it was dialled")
		return nil, net.ErrClosed
	}})
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range [][]string{nil, {"x"}, {"a@b>\r\nRCPT TO:<e@f"}, {"A <a@b>"}} {
		m := letter
		m.To = to
		if err := c.Send(t.Context(), m); err == nil {
			t.Errorf("a mail to %q is sent", to)
		}
	}
}

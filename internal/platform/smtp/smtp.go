// Package smtp sends mail through a relay.
//
// It guarantees that passwords and messages are sent over TLS unless the relay is
// configured for plain text (which excludes a password), that nothing in a
// subject or an address can add a header, and that a message has the same
// Message-ID each time it is sent. The caller decides when to retry, and the
// given Dial decides where to connect.
package smtp

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"mime"
	"mime/quotedprintable"
	"net"
	"net/mail"
	"net/smtp"
	"net/textproto"
	"slices"
	"strings"
	"time"

	"lull/internal/fleet/sealed"
)

// Config configures a Client. Relay, From and Dial are required.
type Config struct {
	Relay    string // host:port
	TLS      string // starttls, tls or none; empty is starttls
	CA       string // PEM; empty means the system's roots
	Username string
	Password sealed.Plain
	From     string
	Hello    string // name sent in the greeting; empty means localhost
	Dial     func(ctx context.Context, network, address string) (net.Conn, error)
	Timeout  time.Duration // limit of one message; 0 means 30 s
}

// Client sends through one relay. It is safe for concurrent use; each message
// has its own connection.
type Client struct {
	cfg  Config
	host string
	tls  *tls.Config
}

// Message is a plain text mail.
type Message struct {
	ID      string // unique and the same at every attempt: letters, digits, '.', '-' and '_'
	Domain  string // the right side of the Message-ID
	To      []string
	Only    []string // the recipients of this mail, a subset of To, which the header lists; empty means all
	Subject string
	Body    string
	Date    time.Time
}

// New returns a Client. It does not connect.
func New(c Config) (*Client, error) {
	host, _, err := net.SplitHostPort(c.Relay)
	if err != nil || host == "" {
		return nil, fmt.Errorf("cannot make a mail client: %.80q is not host:port", c.Relay)
	}
	switch c.TLS {
	case "":
		c.TLS = "starttls"
	case "starttls", "tls":
	case "none":
		if c.Password != "" {
			return nil, errors.New("cannot make a mail client: the password would be sent in the clear")
		}
	default:
		return nil, fmt.Errorf("cannot make a mail client: tls %.40q is not starttls, tls or none", c.TLS)
	}
	if _, err := mail.ParseAddress(c.From); err != nil {
		return nil, fmt.Errorf("cannot make a mail client: %.80q is not a mail address", c.From)
	}
	conf := &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12}
	if c.CA != "" {
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM([]byte(c.CA)) {
			return nil, errors.New("cannot make a mail client: its CA contains no PEM certificate")
		}
	}
	if c.Timeout == 0 {
		c.Timeout = 30 * time.Second
	}
	if c.Hello == "" {
		c.Hello = "localhost"
	}
	return &Client{cfg: c, host: host, tls: conf}, nil
}

// Rejected reports whether err is a final refusal by the relay of this message or
// its recipients, so that another message may still be accepted.
func Rejected(err error) bool {
	e, ok := errors.AsType[*textproto.Error](err)
	return ok && (e.Code == 550 || e.Code == 551 || e.Code == 552 || e.Code == 553 || e.Code == 554)
}

// Partly is the error of a mail for which the relay refused some addresses or
// all. If it refused all, the mail was not sent.
type Partly struct {
	Refused map[string]error // permanent refusals by the relay
	Later   map[string]error // temporary refusals
}

func (p *Partly) Error() string {
	var all []string
	for _, m := range []map[string]error{p.Refused, p.Later} {
		for _, a := range slices.Sorted(maps.Keys(m)) {
			all = append(all, a+": "+m[a].Error())
		}
	}
	return "cannot send a mail to " + strings.Join(all, "; ")
}

// Send passes m to the relay. It returns a *Partly for refused addresses, a
// *textproto.Error if the relay refused the mail itself, or a connection error.
func (c *Client) Send(ctx context.Context, m Message) error {
	text, err := m.bytes(c.cfg.From)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	conn, err := c.cfg.Dial(ctx, "tcp", c.cfg.Relay)
	if err != nil {
		return fmt.Errorf("cannot reach the relay: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	if c.cfg.TLS == "tls" {
		conn = tls.Client(conn, c.tls)
	}
	to := m.To
	if len(m.Only) > 0 {
		to = m.Only
	}
	if err := c.talk(conn, to, text); err != nil {
		if p, ok := errors.AsType[*Partly](err); ok {
			return p
		}
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
		return fmt.Errorf("cannot send a mail through %s: %w", c.host, err)
	}
	return nil
}

func (c *Client) talk(conn net.Conn, to []string, text []byte) error {
	s, err := smtp.NewClient(conn, c.host)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := s.Hello(c.cfg.Hello); err != nil {
		return err
	}
	if c.cfg.TLS == "starttls" {
		if ok, _ := s.Extension("STARTTLS"); !ok {
			return errors.New("it does not offer STARTTLS; set tls: none to send without encryption")
		}
		if err := s.StartTLS(c.tls); err != nil {
			return err
		}
	}
	if c.cfg.Username != "" {
		if err := s.Auth(smtp.PlainAuth("", c.cfg.Username, string(c.cfg.Password), c.host)); err != nil {
			return err
		}
	}
	if err := s.Mail(c.cfg.From); err != nil {
		return err
	}
	part := &Partly{Refused: map[string]error{}, Later: map[string]error{}}
	for _, a := range to {
		err := s.Rcpt(a)
		e, said := errors.AsType[*textproto.Error](err)
		switch {
		case err == nil:
		case Rejected(err):
			part.Refused[a] = err
		case said && e.Code/10 == 45:
			part.Later[a] = err
		default:
			return err // the error is not about this address
		}
	}
	missed := len(part.Refused) + len(part.Later)
	if missed == len(to) {
		_ = s.Quit()
		return part
	}
	w, err := s.Data()
	if err != nil {
		return err
	}
	if _, err := w.Write(text); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	_ = s.Quit() // the relay has the message, so an error of QUIT does not matter
	if missed > 0 {
		return part
	}
	return nil
}

// bytes returns the message in wire format.
func (m Message) bytes(from string) ([]byte, error) {
	if len(m.To) == 0 {
		return nil, errors.New("cannot send a mail without recipients")
	}
	for _, a := range slices.Concat([]string{from}, m.To, m.Only) {
		if p, err := mail.ParseAddress(a); err != nil || p.Address != a {
			return nil, fmt.Errorf("cannot send a mail: %.80q is not a mail address", a)
		}
	}
	var b bytes.Buffer
	head := func(name, value string) { fmt.Fprintf(&b, "%s: %s\r\n", name, value) }
	head("From", from)
	head("To", strings.Join(m.To, ",\r\n "))
	head("Subject", mime.QEncoding.Encode("utf-8", oneLine(m.Subject)))
	head("Date", m.Date.Format(time.RFC1123Z))
	head("Message-ID", "<"+atom(m.ID)+"@"+atom(m.Domain)+">")
	head("MIME-Version", "1.0")
	head("Content-Type", "text/plain; charset=utf-8")
	head("Content-Transfer-Encoding", "quoted-printable")
	head("Auto-Submitted", "auto-generated")
	b.WriteString("\r\n")
	q := quotedprintable.NewWriter(&b)
	if _, err := q.Write([]byte(strings.ReplaceAll(m.Body, "\n", "\r\n"))); err != nil {
		return nil, fmt.Errorf("cannot encode a mail: %w", err)
	}
	if err := q.Close(); err != nil {
		return nil, fmt.Errorf("cannot encode a mail: %w", err)
	}
	return b.Bytes(), nil
}

// oneLine converts any text into a valid header value on one line.
func oneLine(s string) string {
	s = strings.Join(strings.FieldsFunc(strings.ToValidUTF8(s, "?"), func(r rune) bool { return r < ' ' || r == 0x7f }), " ")
	if r := []rune(s); len(r) > 150 {
		s = string(r[:150])
	}
	return s
}

// atom returns s without the characters that a Message-ID must not contain.
func atom(s string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_' || r == '.' {
			return r
		}
		return '-'
	}, s)
}

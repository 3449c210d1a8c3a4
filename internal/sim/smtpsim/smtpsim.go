// Package smtpsim is a mail relay for tests. It accepts mail in plain text, keeps it,
// and rejects the recipients that the test chooses. It has no TLS and no passwords;
// platform/smtp tests those against a real relay.
package smtpsim

import (
	"io"
	"mime"
	"mime/quotedprintable"
	"net"
	"net/mail"
	"net/textproto"
	"slices"
	"strings"
	"sync"
	"time"
)

// Mail is an accepted mail.
type Mail struct {
	To   []string // recipients in the envelope
	Head mail.Header
	// Subject and Body are decoded.
	Subject, Body string
	At            time.Time
}

// Relay is a mail relay. The zero value is ready for use; Serve gives it a
// listener. It is safe for concurrent use.
type Relay struct {
	// Recipient returns the response to an address, as a code and a text; empty
	// accepts the address. A nil Recipient accepts all. It is called with r.mu held.
	Recipient func(address string) string

	mu    sync.Mutex
	mails []Mail
	conns sync.WaitGroup
}

// Mails returns the accepted mails, in order.
func (r *Relay) Mails() []Mail {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.mails)
}

// Serve accepts mail until l is closed, and waits for its connections.
func (r *Relay) Serve(l net.Listener) {
	defer r.conns.Wait()
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		r.conns.Go(func() {
			defer conn.Close()
			_ = r.talk(textproto.NewConn(conn)) // an error means that the client has disconnected
		})
	}
}

// talk handles one connection and returns its error.
func (r *Relay) talk(c *textproto.Conn) error {
	say := func(line string) error { return c.PrintfLine("%s", line) }
	if err := say("220 relay"); err != nil {
		return err
	}
	var to []string
	for {
		line, err := c.ReadLine()
		if err != nil {
			return err
		}
		verb, rest, _ := strings.Cut(line, " ")
		answer := "250 OK"
		switch strings.ToUpper(verb) {
		case "MAIL":
			to = nil
		case "RCPT":
			a := strings.Trim(rest[strings.IndexByte(rest, ':')+1:], "<>")
			if no := r.refuses(a); no != "" {
				answer = no
			} else {
				to = append(to, a)
			}
		case "DATA":
			if len(to) == 0 {
				answer = "503 no recipients"
				break
			}
			if err := say("354 continue"); err != nil {
				return err
			}
			text, err := c.ReadDotBytes()
			if err != nil {
				return err
			}
			if err := r.keep(to, string(text)); err != nil {
				answer = "550 " + err.Error()
			}
		case "QUIT":
			return say("221 bye")
		}
		if err := say(answer); err != nil {
			return err
		}
	}
}

func (r *Relay) refuses(address string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.Recipient == nil {
		return ""
	}
	return r.Recipient(address)
}

func (r *Relay) keep(to []string, text string) error {
	m, err := mail.ReadMessage(strings.NewReader(text))
	if err != nil {
		return err
	}
	body, err := io.ReadAll(quotedprintable.NewReader(m.Body))
	if err != nil {
		return err
	}
	subject, err := new(mime.WordDecoder).DecodeHeader(m.Header.Get("Subject"))
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mails = append(r.mails, Mail{To: to, Head: m.Header, Subject: subject, Body: string(body), At: time.Now()})
	return nil
}

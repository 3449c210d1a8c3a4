// Package sealed holds secrets as references or encrypted with a key that is not in
// the store, and signs links and enrollment secrets.
package sealed

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"lull/internal/core/failure"
)

// Secret is a setting that holds a secret: a reference ("file:/path" or "env:NAME");
// a secret encrypted with a key outside the store ("sealed:BASE64"); or, in a flag,
// the environment or a config file, the secret itself. It prints as the reference,
// and otherwise without its content.
type Secret string

// hidden stands for the content of a secret.
const hidden = "***"

// IsReference reports whether s has the form file:PATH or env:NAME and at most 1 KiB.
func (s Secret) IsReference() bool {
	kind, rest, _ := strings.Cut(string(s), ":")
	return (kind == "file" || kind == "env") && rest != "" && len(rest) <= 1024
}

// String returns a reference unchanged, and hides anything else.
func (s Secret) String() string {
	switch {
	case s == "" || s.IsReference():
		return string(s)
	case strings.HasPrefix(string(s), "sealed:"):
		return "sealed:" + hidden
	}
	return hidden
}

// Format hides the secret under every verb of fmt.
func (s Secret) Format(f fmt.State, verb rune) { fmt.Fprintf(f, fmt.FormatString(f, verb), s.String()) }

// LogValue hides the secret in logs.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalText encodes s for a record or a file. It hides a secret that is
// neither a reference nor encrypted.
func (s Secret) MarshalText() ([]byte, error) {
	if strings.HasPrefix(string(s), "sealed:") {
		return []byte(s), nil
	}
	return []byte(s.String()), nil
}

// Plain is a decrypted or resolved secret. It prints as ***, even in JSON and logs.
type Plain string

// Format hides the secret under every verb of fmt.
func (p Plain) Format(f fmt.State, _ rune) { io.WriteString(f, hidden) }

// String hides the secret.
func (p Plain) String() string { return hidden }

// LogValue hides the secret in logs.
func (p Plain) LogValue() slog.Value { return slog.StringValue(hidden) }

// MarshalText hides the secret.
func (p Plain) MarshalText() ([]byte, error) { return []byte(hidden), nil }

// Sealer encrypts secrets. A nil Sealer returns an error instead.
type Sealer struct {
	aead cipher.AEAD
	key  []byte // signs links and enrollment secrets
}

// NewSealer returns a Sealer with a key of 32 bytes.
func NewSealer(key []byte) (*Sealer, error) {
	if len(key) != 32 {
		return nil, fmt.Errorf("cannot use the sealing key: it has %d bytes, not 32", len(key))
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, fmt.Errorf("cannot use the sealing key: %w", err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return nil, fmt.Errorf("cannot use the sealing key: %w", err)
	}
	links, err := hkdf.Key(sha256.New, key, nil, "lull links of warnings", 32)
	if err != nil {
		return nil, fmt.Errorf("cannot use the sealing key: %w", err)
	}
	return &Sealer{aead, links}, nil
}

// Seal converts a user's value of field to a Secret: it keeps a reference, and
// encrypts anything else.
func (s *Sealer) Seal(field, given string) (Secret, error) {
	switch {
	case given == "", strings.HasPrefix(given, "file:"), strings.HasPrefix(given, "env:"):
		return Secret(given), nil
	case strings.HasPrefix(given, "sealed:"):
		return "", failure.Invalidf(field, "want file:PATH, env:NAME or a literal, not a sealed secret")
	case s == nil:
		return "", failure.Invalidf(field, "there is no sealing key; give file:PATH or env:NAME")
	case len(given) > 4096:
		return "", failure.Invalidf(field, "it has %d bytes, the limit is 4096", len(given))
	}
	nonce := make([]byte, s.aead.NonceSize())
	if _, err := rand.Read(nonce); err != nil {
		return "", fmt.Errorf("cannot seal %s: %w", field, err)
	}
	box := s.aead.Seal(nonce, nonce, []byte(given), []byte("lull secret"))
	return Secret("sealed:" + base64.RawStdEncoding.EncodeToString(box)), nil
}

// Open returns the plain secret. file and env resolve references.
func (s *Sealer) Open(ref Secret, file, env func(string) (Plain, error)) (Plain, error) {
	kind, rest, _ := strings.Cut(string(ref), ":")
	switch {
	case kind == "file":
		return file(rest)
	case kind == "env":
		return env(rest)
	case kind != "sealed":
		return Plain(ref), nil
	case s == nil:
		return "", fmt.Errorf("cannot open a sealed secret without the key")
	}
	box, err := base64.RawStdEncoding.DecodeString(rest)
	if err != nil || len(box) < s.aead.NonceSize() {
		return "", fmt.Errorf("cannot open a sealed secret: it is corrupt")
	}
	n := s.aead.NonceSize()
	plain, err := s.aead.Open(nil, box[:n], box[n:], []byte("lull secret"))
	if err != nil {
		return "", fmt.Errorf("cannot open a sealed secret: it was sealed with another key, or is corrupt")
	}
	return Plain(plain), nil
}

// MAC returns a signature of text, for links and enrollment secrets.
func (s *Sealer) MAC(text string) []byte {
	m := hmac.New(sha256.New, s.key)
	m.Write([]byte(text))
	return m.Sum(nil)
}

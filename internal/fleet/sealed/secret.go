// Package sealed holds secrets as references or encrypted with a key that is
// not in the store, and signs what lull gives out and must recognize.
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
	"strings"

	"lull/internal/core/failure"
)

// Secret is a reference to a secret, or a secret encrypted with a key outside
// the store: "file:/path", "env:NAME" or "sealed:BASE64". It is never the
// secret itself, and prints only its kind.
type Secret string

// String hides the content of a sealed secret.
func (s Secret) String() string {
	if strings.HasPrefix(string(s), "sealed:") {
		return "sealed:***"
	}
	return string(s)
}

// GoString hides it in %#v as well.
func (s Secret) GoString() string { return s.String() }

// Sealer encrypts secrets given in the clear. A nil Sealer refuses them.
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

// Seal converts a user's value of field to a Secret: references stay as they
// are, anything else is encrypted.
func (s *Sealer) Seal(field, given string) (Secret, error) {
	switch {
	case given == "", strings.HasPrefix(given, "file:"), strings.HasPrefix(given, "env:"):
		return Secret(given), nil
	case strings.HasPrefix(given, "sealed:"):
		return "", failure.Invalidf(field, "a sealed secret cannot be given from outside")
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

// Open returns the secret. file and env read the target of a reference.
func (s *Sealer) Open(ref Secret, file, env func(string) (string, error)) (string, error) {
	kind, rest, _ := strings.Cut(string(ref), ":")
	switch {
	case ref == "":
		return "", nil
	case kind == "file":
		return file(rest)
	case kind == "env":
		return env(rest)
	case kind != "sealed":
		return "", fmt.Errorf("cannot open a secret of kind %q", kind)
	case s == nil:
		return "", fmt.Errorf("cannot open a sealed secret without the key")
	}
	box, err := base64.RawStdEncoding.DecodeString(rest)
	if err != nil || len(box) < s.aead.NonceSize() {
		return "", fmt.Errorf("cannot open a sealed secret: it is damaged")
	}
	n := s.aead.NonceSize()
	plain, err := s.aead.Open(nil, box[:n], box[n:], []byte("lull secret"))
	if err != nil {
		return "", fmt.Errorf("cannot open a sealed secret: the key is another one or it is damaged")
	}
	return string(plain), nil
}

// MAC returns a signature over text, for links and enrollment secrets.
func (s *Sealer) MAC(text string) []byte {
	m := hmac.New(sha256.New, s.key)
	m.Write([]byte(text))
	return m.Sum(nil)
}

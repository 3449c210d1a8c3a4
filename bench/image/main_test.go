package main

import (
	"archive/tar"
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"lull/internal/lib/errtest"
)

// TestOf packs a program twice and checks that the bytes are equal, that the
// image is valid, and that only their owner can write to its files.
func TestOf(t *testing.T) {
	at := time.Unix(1.7e9, 0).UTC()
	pack := func() []byte {
		img, err := of([]byte("program"), "1.2.3", "arm64", at)
		errtest.None(t, err)
		var b bytes.Buffer
		errtest.None(t, write(&b, img, "lull:1.2.3", at))
		return b.Bytes()
	}
	packed := pack()
	if !bytes.Equal(packed, pack()) {
		t.Error("the image differs when it is packed again")
	}
	img, err := tarball.Image(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(packed)), nil }, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Image(img); err != nil {
		t.Error(err)
	}
	config, err := img.ConfigFile()
	errtest.None(t, err)
	if config.Architecture != "arm64" || !config.Created.Time.Equal(at) || config.Config.User != "65532:65532" {
		t.Errorf("the image is %+v", config)
	}
	layers, err := img.Layers()
	errtest.None(t, err)
	for name, h := range unpack(t, layers[0]) {
		if owned := h.Uid == user; owned != (name == "data/") || !h.ModTime.Equal(at) {
			t.Errorf("%s belongs to %d since %v", name, h.Uid, h.ModTime)
		}
	}
}

// unpack returns the files of a layer, by name.
func unpack(t *testing.T, layer v1.Layer) map[string]*tar.Header {
	t.Helper()
	r, err := layer.Uncompressed()
	errtest.None(t, err)
	all := map[string]*tar.Header{}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all[h.Name] = h
	}
}

// TestAuthorities checks that every certificate can be parsed, and that AWS's own
// authorities are among them.
func TestAuthorities(t *testing.T) {
	found := map[string]bool{}
	for rest := authorities(); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			if len(bytes.TrimSpace(rest)) > 0 {
				t.Errorf("%d bytes are no certificate", len(rest))
			}
			break
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil || !c.IsCA {
			t.Fatalf("%v, an authority: %t", err, err == nil && c.IsCA)
		}
		found[c.Subject.CommonName] = true
	}
	if !found["Amazon Root CA 1"] || len(found) < 100 {
		t.Errorf("%d authorities, Amazon's: %t", len(found), found["Amazon Root CA 1"])
	}
}

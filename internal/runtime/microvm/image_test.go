package microvm

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/platform/oci"
	"lull/internal/protocol/guest"
)

// ociImage returns an image with the test's program, a user, and a
// configuration without default values.
func ociImage(t *testing.T, program string) v1.Image {
	t.Helper()
	text, err := os.ReadFile(program)
	errtest.None(t, err)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range []struct {
		name string
		mode int64
		body []byte
	}{
		{"opt/guest", 0o755, text},
		{"etc/passwd", 0o644, []byte("root:x:0:0::/root:/bin/sh\nweb:x:33:34::/home/web:/bin/sh\n")},
		{"etc/group", 0o644, []byte("web:x:34:\nlogs:x:55:web\n")},
	} {
		errtest.None(t, w.WriteHeader(&tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.body)), Uid: os.Geteuid(), Gid: os.Getegid()}))
		errtest.Get(w.Write(f.body))(t)
	}
	errtest.None(t, w.Close())
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err == nil {
		img, err = mutate.Config(img, v1.Config{Entrypoint: []string{"guest"}, Cmd: []string{"serve", ":80"}, User: "web",
			Env: []string{"PATH=/opt", "FROM=image", "ONLY=here"}, WorkingDir: "/srv/here"})
	}
	if err == nil {
		f, ferr := img.ConfigFile()
		if ferr != nil {
			t.Fatal(ferr)
		}
		f.Architecture, f.OS = "amd64", "linux"
		img, err = mutate.ConfigFile(img, f)
	}
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// TestImage checks that a guest's files, command, environment, directory and
// user come from an OCI image, which is unpacked and built once.
func TestImage(t *testing.T) {
	parts, err := rig()
	need(t, err)
	if _, err := FindTool("mke2fs"); err != nil {
		need(t, &absent{"no mke2fs (Debian package e2fsprogs)"})
	}
	img := ociImage(t, parts.program)
	saved := filepath.Join(t.TempDir(), "image.tar")
	tag, err := name.NewTag("some/image:v1")
	if err == nil {
		err = tarball.WriteToFile(saved, tag, img)
	}
	if err != nil {
		t.Fatal(err)
	}
	b := newBench(t, func(c *Config) {
		if c.Images, err = oci.OpenStore(filepath.Join(c.Dir, "oci"), oci.Limits{}); err != nil {
			t.Fatal(err)
		}
	})

	// An image from a registry gives the same result as one from an archive.
	srv := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(srv.Close)
	ref, err := name.ParseReference(strings.TrimPrefix(srv.URL, "http://") + "/some/image:v1")
	if err == nil {
		err = remote.Write(ref, img)
	}
	if err != nil {
		t.Fatal(err)
	}
	want := guest.RunCall{Command: []string{"guest", "serve", ":80"}, Dir: "/srv/here", User: "33:34", Groups: []int{55},
		Env: []string{"PATH=/opt", "HOME=/home/web", "FROM=image", "ONLY=here", "MORE=asked"}}
	for _, from := range []string{saved, ref.String()} {
		spec := instance.Spec{Image: from}
		if err := b.CheckSpec(&spec); err != nil {
			t.Errorf("%s: %v", from, err)
		}
		call := guest.RunCall{Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "MORE=asked"}}
		first, err := b.prepareRoot(t.Context(), from, &call)
		errtest.None(t, err)
		if d := cmp.Diff(want, call); d != "" {
			t.Errorf("%s: the program to run (-want +got):\n%s", from, d)
		}
		was, err := os.Stat(first)
		errtest.None(t, err)
		again, err := b.prepareRoot(t.Context(), from, new(guest.RunCall))
		errtest.None(t, err)
		if is, err := os.Stat(again); err != nil || !os.SameFile(was, is) {
			t.Errorf("%s: it was made again: %s, %s, %v", from, first, again, err)
		}
	}
	srv.Close() // a cached image is not requested again
	if _, err := b.prepareRoot(t.Context(), ref.String(), new(guest.RunCall)); err != nil {
		t.Error(err)
	}

	l := b.launch("oci", 1)
	l.Image, l.Env, l.Dir = saved, nil, ""
	w, err := b.Start(t.Context(), l)
	errtest.None(t, err)
	listening(t, w.(*Work), "80")
	for _, c := range []struct{ args, want string }{
		{"whoami", "33 34\n"},
		{"where", "/srv/here [55] image here /home/web\n"},
	} {
		o, err := b.Exec(t.Context(), "oci", instance.Command{Command: append([]string{"guest"}, strings.Fields(c.args)...)})
		if err != nil || o.Stdout != c.want {
			t.Errorf("%s: %+v, %v; want %q", c.args, o, err, c.want)
		}
	}
	errtest.None(t, w.Kill(t.Context()))
	b.clean("oci")

	// A request for something that the image does not have is rejected with that
	// reason.
	for _, c := range []struct{ image, user, want string }{
		{filepath.Join(t.TempDir(), "nothing.tar"), "", "nothing.tar"},
		{saved, "no-such-user", "no such user"},
		{"NOT/a reference", "", "reference"},
	} {
		l := b.launch("bad", 1)
		l.Image, l.User = c.image, c.user
		if _, err := b.Start(t.Context(), l); err == nil || !strings.Contains(fmt.Sprint(err), c.want) {
			t.Errorf("%s, user %q: %v; want %q in it", c.image, c.user, err, c.want)
		}
	}
}

// TestManySmallFiles checks that an image can be built of a tree with more entries
// than mke2fs expects for its size.
func TestManySmallFiles(t *testing.T) {
	if _, err := FindTool("mke2fs"); err != nil {
		need(t, &absent{"no mke2fs (Debian package e2fsprogs)"})
	}
	root := t.TempDir()
	errtest.None(t, os.WriteFile(filepath.Join(root, "large"), nil, 0o644))
	// Sparse; from 512 MiB on, mke2fs would expect even fewer files.
	if err := os.Truncate(filepath.Join(root, "large"), 260<<20); err != nil {
		t.Fatal(err)
	}
	const links = 40_000
	for n := range links / 1000 {
		dir := filepath.Join(root, strconv.Itoa(n))
		errtest.None(t, os.Mkdir(dir, 0o755))
		for k := range 1000 {
			errtest.None(t, os.Symlink("x", filepath.Join(dir, strconv.Itoa(k))))
		}
	}
	r := &Runtime{cfg: Config{Dir: t.TempDir()}, making: make(chan struct{}, 1)}
	if _, err := r.makeImage(t.Context(), root, ""); err != nil {
		t.Error(err)
	}
}

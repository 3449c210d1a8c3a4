package containers

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/hostctl"
)

// says is an image's run configuration.
type says struct {
	entrypoint, cmd, env []string
	dir, user, stop      string
}

// packed returns a tar of a directory, owned by root.
func packed(t *testing.T, dir string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err := filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		st, err := e.Info()
		if err != nil {
			return err
		}
		to := ""
		if st.Mode()&fs.ModeSymlink != 0 {
			if to, err = os.Readlink(p); err != nil {
				return err
			}
		}
		h, err := tar.FileInfoHeader(st, to)
		if err != nil {
			return err
		}
		h.Name, h.Uid, h.Gid = strings.TrimPrefix(p, dir+"/"), 0, 0
		if err := w.WriteHeader(h); err != nil || !st.Mode().IsRegular() {
			return err
		}
		text, err := os.ReadFile(p)
		if err == nil {
			_, err = w.Write(text)
		}
		return err
	})
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// entries returns a tar with the given headers. An entry with a size gets a body
// of that size.
func entries(t *testing.T, hs ...*tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range hs {
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		h.Mode = 0o755
		errtest.None(t, w.WriteHeader(h))
		errtest.Get(w.Write(bytes.Repeat([]byte("x"), int(h.Size))))(t)
	}
	errtest.None(t, w.Close())
	return b.Bytes()
}

func layer(t *testing.T, b []byte) v1.Layer {
	t.Helper()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// image returns an image with layers, each a tar.
func image(t *testing.T, c says, layers ...[]byte) v1.Image {
	t.Helper()
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH, RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{Entrypoint: c.entrypoint, Cmd: c.cmd, Env: c.env, WorkingDir: c.dir, User: c.user, StopSignal: c.stop}})
	for _, b := range layers {
		if err == nil {
			img, err = mutate.AppendLayers(img, layer(t, b))
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// saved returns the path of a docker-save archive with the tests' programs.
func saved(t *testing.T, c says) string {
	t.Helper()
	return save(t, image(t, c, packed(t, daemontest.Image(t))))
}

func save(t *testing.T, img v1.Image) string {
	t.Helper()
	ref, err := name.ParseReference("test/image:1")
	errtest.None(t, err)
	at := filepath.Join(t.TempDir(), "image.tar")
	errtest.None(t, tarball.WriteToFile(at, ref, img))
	return at
}

// layoutOf writes an OCI layout of img, as a directory and as a tar.
func layoutOf(t *testing.T, img v1.Image) (dir, file string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "layout")
	p, err := layout.Write(dir, empty.Index)
	if err == nil {
		err = p.AppendImage(img, layout.WithPlatform(v1.Platform{OS: "linux", Architecture: runtime.GOARCH}))
	}
	file = dir + ".tar"
	if err == nil {
		err = os.WriteFile(file, packed(t, dir), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir, file
}

// pushed pushes img to a registry of the test and returns its reference.
func pushed(t *testing.T, img v1.Image) (string, *httptest.Server) {
	t.Helper()
	srv := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(srv.Close)
	_, port, err := net.SplitHostPort(srv.Listener.Addr().String())
	errtest.None(t, err)
	ref, err := name.ParseReference("localhost:" + port + "/some/image:v1")
	if err == nil {
		err = remote.Write(ref, img)
	}
	if err != nil {
		t.Fatal(err)
	}
	return ref.String(), srv
}

// TestImageSays checks, for every kind of source, that the image's command,
// environment, directory and user apply unless the user sets them.
func TestImageSays(t *testing.T) {
	t.Parallel()
	d := host(t)
	root := daemontest.Image(t)
	for name, text := range map[string]string{"etc/passwd": "root:x:0:0::/root:/bin/sh\nweb:x:77:78::/home/web:/bin/sh\n",
		"etc/group": "web:x:78:\nmore:x:99:web\n"} {
		errtest.None(t, os.WriteFile(filepath.Join(root, name), []byte(text), 0o644))
	}
	show := `echo "$(pwd) $(id -u):$(id -g):$(id -G) $A $B $HOME $0"`
	img := image(t, says{entrypoint: []string{"/bin/sh", "-c", show}, cmd: []string{"cmd"}, env: []string{"A=image", "B=image"}, dir: "/srv/made", user: "web"},
		packed(t, root))
	dir, file := layoutOf(t, img)
	ref, srv := pushed(t, img)
	const own = "/srv/made 77:78:78 99 image image /home/web cmd\n"
	for n, src := range []string{save(t, img), dir, file, ref} {
		s := box("own"+string(rune('a'+n)), src)
		if said, o := ends(d, s); said != own {
			t.Errorf("%s: it says %q: %s; want %q", src, said, o.StatusReason, own)
		}
		s = box("given"+string(rune('a'+n)), src, "/bin/sh", "-c", show, "mine")
		s.Env, s.User, s.Workdir = []string{"B=mine"}, "5:6", "/tmp"
		if said, o := ends(d, s); said != "/tmp 5:6:6 image mine / mine\n" {
			t.Errorf("%s: with one's own it says %q: %s", src, said, o.StatusReason)
		}
	}
	srv.Close() // the image is stored, so the registry is not needed
	if said, o := ends(d, box("again", ref)); said != own {
		t.Errorf("without its registry: %q, %s", said, o.StatusReason)
	}

	// A directory or tar without configuration requires a command.
	tree := filepath.Join(t.TempDir(), "root.tar")
	errtest.None(t, os.WriteFile(tree, packed(t, root), 0o600))
	for n, src := range []string{root, tree} {
		refuses(d, box("silent"+string(rune('a'+n)), src), "neither the instance nor its image has a command")
		if said, o := ends(d, box("bare"+string(rune('a'+n)), src, script(show)...)); said != "/ 0:0:0   /root /bin/sh\n" {
			t.Errorf("%s: %q, %s", src, said, o.StatusReason)
		}
	}
	u := box("no-such-user", root, "true")
	u.User = "no-such-user"
	refuses(d, u, "no-such-user")
	if left := leftOf(d, ""); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// TestHostileImages checks that an invalid image is refused with the reason and
// leaves nothing behind, and that paths that seem to leave the image stay inside.
func TestHostileImages(t *testing.T) {
	t.Parallel()
	d := host(t)
	root := packed(t, daemontest.Image(t))
	outside := filepath.Join(t.TempDir(), "outside")
	errtest.None(t, os.WriteFile(outside, []byte("mine"), 0o644))
	link := func(name, to string, kind byte) *tar.Header {
		return &tar.Header{Name: name, Linkname: to, Typeflag: kind}
	}
	run := says{cmd: []string{"/bin/sh", "-c", "echo runs"}}
	for what, c := range map[string]struct {
		layers []*tar.Header
		want   string
	}{
		"a path that leads out":           {[]*tar.Header{{Name: "../../../../../../.." + outside, Size: 3}}, "leaves its directory"},
		"a hard link that leads out":      {[]*tar.Header{link("h", "../../../../.."+outside, tar.TypeLink)}, "cannot link"},
		"a hard link through a link":      {[]*tar.Header{link("l", "/../../..", tar.TypeSymlink), link("h", "l"+outside, tar.TypeLink)}, "no such file"},
		"links in a circle":               {[]*tar.Header{link("a", "b", tar.TypeSymlink), link("b", "a", tar.TypeSymlink), {Name: "a/f"}}, "links"},
		"a whiteout of its own parent":    {[]*tar.Header{{Name: "bin/.wh..."}}, "whiteout of nothing"},
		"a whiteout of the directory":     {[]*tar.Header{{Name: "bin/.wh.."}}, "whiteout of nothing"},
		"a kind of entry that is unknown": {[]*tar.Header{{Name: "x", Typeflag: 'Z'}}, "unknown"},
		"an owner out of range":           {[]*tar.Header{{Name: "x", Uid: 1 << 33, Format: tar.FormatPAX}}, "out of range"},
		"a name that is too long a part":  {[]*tar.Header{{Name: strings.Repeat("x", 300)}}, "too long"},
	} {
		s := box("hostile", save(t, image(t, run, root, entries(t, c.layers...))))
		refuses(d, s, "cannot use image", "layer 2", c.want)
		if l, err := d.Images(t.Context()); err != nil || len(l) > 1 || len(leftOf(d, "")) > 0 {
			t.Errorf("%s: left: %+v, %q, %v", what, l, leftOf(d, ""), err)
		}
	}

	// Links through which a later layer writes, duplicate entries and whiteouts
	// must affect the image only.
	img := image(t, says{cmd: script("cat /etc/twice /tmp/f; test -e /etc/gone && echo there; test -L /way && echo link")}, root,
		entries(t, &tar.Header{Name: "etc/twice", Size: 1}, &tar.Header{Name: "etc/twice", Size: 2}, &tar.Header{Name: "etc/gone", Size: 1}, link("way", "/../../../../tmp", tar.TypeSymlink)),
		entries(t, &tar.Header{Name: "etc/.wh.gone"}, &tar.Header{Name: "way/f", Size: 4}))
	if said, o := ends(d, box("odd", save(t, img))); said != "xxxxxxlink\n" {
		t.Errorf("odd, and right: %q, %s", said, o.StatusReason)
	}
	holds(t, outside, "mine", 0)
}

// TestWrongImages checks that a truncated, modified or unrelated file is refused.
func TestWrongImages(t *testing.T) {
	t.Parallel()
	d := host(t)
	good := image(t, says{cmd: []string{"true"}}, packed(t, daemontest.Image(t)))
	digest := func(img v1.Image) string {
		l, err := img.Layers()
		errtest.None(t, err)
		h, err := l[0].Digest()
		errtest.None(t, err)
		return h.Hex
	}
	dir, _ := layoutOf(t, good)
	blob := filepath.Join(dir, "blobs/sha256", digest(good))
	b, err := os.ReadFile(blob)
	errtest.None(t, err)
	other := layer(t, entries(t, &tar.Header{Name: "evil", Size: 100}))
	r, err := other.Compressed()
	errtest.None(t, err)
	evil, err := io.ReadAll(r)
	errtest.None(t, err)
	for what, text := range map[string][]byte{"cut": b[:len(b)/2], "empty": nil, "another layer": evil, "no layer": []byte("hello")} {
		errtest.None(t, os.WriteFile(blob, text, 0o644))
		refuses(d, box("wrong", dir), "cannot use image", "layer 1")
		if left := leftOf(d, ""); len(left) > 0 {
			t.Errorf("%s: left: %q", what, left)
		}
	}

	ref, srv := pushed(t, good)
	refuses(d, box("absent", ref+"-none"), "cannot use image", "none")
	srv.Close()
	refuses(d, box("away", strings.Replace(ref, "some/", "other/", 1)), "cannot use image", "refused")
	junk := filepath.Join(t.TempDir(), "junk")
	errtest.None(t, os.WriteFile(junk, bytes.Repeat([]byte("junk"), 1000), 0o600))
	refuses(d, box("junk", junk, "true"), "cannot use image", junk)
	refuses(d, box("none", junk+"-none", "true"), "cannot use image", "no such file")
	refuses(d, box("rel", "No/Reference", "true"), "cannot use image")
	// With / as the image, the container's writes would end up in its own image.
	refuses(d, box("all", "/", "true"), "cannot use / as an image", "data directory")
	if l, err := d.Images(t.Context()); err != nil || len(l) != 0 {
		t.Errorf("images: %+v, %v", l, err)
	}
}

// TestImageInUse checks that an image cannot be removed while a container uses
// it, even a stopped one.
func TestImageInUse(t *testing.T) {
	t.Parallel()
	d := host(t)
	s := box("uses", saved(t, says{cmd: script("exit 0")}))
	o := d.Launch(s)
	d.Await("uses", "stopped")
	l, err := d.Images(t.Context())
	if err != nil || len(l) != 1 || !l[0].InUse {
		t.Fatalf("images: %+v, %v", l, err)
	}
	if _, err := d.Create(t.Context(), hostctl.Create{Spec: instance.Spec{Name: "uses", Command: []string{"true"}}}); err == nil {
		t.Error("a name was given twice")
	}
	errtest.None(t, d.Remove(t.Context(), "uses"))
	if left := leftOf(d, o.ID); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if l, err := d.Images(t.Context()); err != nil || len(l) != 1 || l[0].InUse {
		t.Errorf("images: %+v, %v", l, err)
	}
}

// TestSilentRegistry checks that a container that waits for an unresponsive
// registry can be stopped and removed, even after its client has disconnected.
func TestSilentRegistry(t *testing.T) {
	t.Parallel()
	d := host(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	errtest.None(t, err)
	defer ln.Close()
	for _, name := range []string{"left", "waited"} {
		ctx, leave := context.WithCancel(t.Context())
		gone := make(chan error, 1)
		go func() {
			_, err := d.Create(ctx, hostctl.Create{Spec: box(name, ln.Addr().String()+"/image:v1", "true"), Start: true})
			gone <- err
		}()
		c, err := ln.Accept()
		errtest.None(t, err)
		defer c.Close()
		o := d.Show(name)
		if o.State != "starting" {
			t.Errorf("meanwhile it is %s", o.State)
		}
		if name == "left" {
			leave()
		}
		if err := d.Remove(t.Context(), name); err != nil {
			t.Error(err)
		}
		if err := <-gone; err == nil {
			t.Error("it runs")
		}
		leave()
		if left := leftOf(d, o.ID); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	}
}

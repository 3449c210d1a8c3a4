package oci

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"lull/internal/lib/errtest"
)

// pack returns a tar with entries written as "name", "name=content",
// "name->link", "name=>hard link", or "name/" for a directory.
func pack(t testing.TB, entries ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Name: e, Mode: 0o644, Uid: os.Geteuid(), Gid: os.Getegid(), Typeflag: tar.TypeReg}
		body := ""
		if n, to, ok := strings.Cut(e, "=>"); ok {
			h.Name, h.Linkname, h.Typeflag = n, to, tar.TypeLink
		} else if n, to, ok := strings.Cut(e, "->"); ok {
			h.Name, h.Linkname, h.Typeflag = n, to, tar.TypeSymlink
		} else if n, c, ok := strings.Cut(e, "="); ok {
			h.Name, body = n, c
		} else if strings.HasSuffix(e, "/") {
			h.Typeflag, h.Mode = tar.TypeDir, 0o755
		}
		h.Size = int64(len(body))
		errtest.None(t, w.WriteHeader(h))
		errtest.Get(io.WriteString(w, body))(t)
	}
	errtest.None(t, w.Close())
	return b.Bytes()
}

// tree returns the files below dir in pack's notation, by name. Hard links appear
// as separate files.
func tree(t testing.TB, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		switch {
		case d.IsDir():
			out[rel] = "/"
		case d.Type()&fs.ModeSymlink != 0:
			to, err := os.Readlink(p)
			out[rel] = "->" + to
			return err
		case d.Type().IsRegular():
			b, err := os.ReadFile(p)
			out[rel] = string(b)
			return err
		default:
			out[rel] = d.Type().String()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// apply unpacks layers into dir and fails the test if a file beside dir has
// changed.
func apply(t testing.TB, l Limits, layers ...[]byte) (dir string, err error) {
	t.Helper()
	top := t.TempDir()
	errtest.None(t, os.WriteFile(filepath.Join(top, "outside"), []byte("mine"), 0o600))
	dir = filepath.Join(top, "root")
	errtest.None(t, os.Mkdir(dir, 0o755))
	err = within(dir, func(r *os.Root) error {
		u := newUnpacker(r, l)
		for _, b := range layers {
			if err := u.layer(bytes.NewReader(b), ""); err != nil {
				return err
			}
		}
		return nil
	})
	b, rerr := os.ReadFile(filepath.Join(top, "outside"))
	names, derr := os.ReadDir(top)
	if rerr != nil || derr != nil || string(b) != "mine" || len(names) != 2 {
		t.Fatalf("something outside was touched: %q, %v, %v, %v", b, names, rerr, derr)
	}
	return dir, err
}

func TestLayers(t *testing.T) {
	for _, c := range []struct {
		name   string
		layers [][]string
		want   map[string]string
	}{
		{"files, directories, links", [][]string{{"a/", "a/f=x", "a/l->f", "h=>a/f", "deep/er/g=y"}},
			map[string]string{"a": "/", "a/f": "x", "a/l": "->f", "h": "x", "deep": "/", "deep/er": "/", "deep/er/g": "y"}},
		{"a later layer replaces", [][]string{{"a=1", "d/", "d/x=1"}, {"a=2", "d=now a file"}},
			map[string]string{"a": "2", "d": "now a file"}},
		{"a directory over a directory keeps what is in it", [][]string{{"d/", "d/x=1"}, {"d/", "d/y=2"}},
			map[string]string{"d": "/", "d/x": "1", "d/y": "2"}},
		{"whiteouts", [][]string{{"a=1", "d/", "d/x=1", "d/y=1"}, {".wh.a", "d/.wh.x", "d/.wh..wh.plnk"}},
			map[string]string{"d": "/", "d/y": "1"}},
		{"an opaque directory spares its own layer", [][]string{{"d/", "d/x=1"}, {"d/", "d/new=2", "d/.wh..wh..opq"}},
			map[string]string{"d": "/", "d/new": "2"}},
		{"links of directories are followed inside", [][]string{{"usr/", "usr/bin/", "bin->/usr/bin", "lib->../../usr"}, {"bin/sh=x", "lib/z=y"}},
			map[string]string{"usr": "/", "usr/bin": "/", "usr/bin/sh": "x", "usr/z": "y", "bin": "->/usr/bin", "lib": "->../../usr"}},
		{"a link out of the root stays inside it", [][]string{{"out->../../..", "abs->/"}, {"out/f=x", "abs/g=y"}},
			map[string]string{"out": "->../../..", "abs": "->/", "f": "x", "g": "y"}},
		{"a link is replaced, not written through", [][]string{{"l->/outside"}, {"l=x"}}, map[string]string{"l": "x"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var layers [][]byte
			for _, l := range c.layers {
				layers = append(layers, pack(t, l...))
			}
			dir, err := apply(t, Limits{}, layers...)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, tree(t, dir)); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestHostileLayers(t *testing.T) {
	for _, c := range []struct {
		name    string
		entries []string
		limits  Limits
		want    string
	}{
		{"a name that leaves its directory", []string{"../outside=x"}, Limits{}, `"../outside"`},
		{"in the middle", []string{"a/../../outside=x"}, Limits{}, "leaves its directory"},
		{"a hard link that leaves its directory", []string{"h=>../outside"}, Limits{}, "cannot link"},
		{"a hard link through a link", []string{"l->..", "h=>l/outside"}, Limits{}, "no such file"},
		{"a hard link to a directory", []string{"d/", "h=>d"}, Limits{}, "directory"},
		{"links in a circle", []string{"a->b", "b->a", "a/f=x"}, Limits{}, "links"},
		{"a whiteout of the directory itself", []string{"d/", "d/.wh.."}, Limits{}, "whiteout of nothing"},
		{"a file as a directory", []string{"f=x", "f/g=y"}, Limits{}, "f/g"},
		{"too many bytes", []string{"a=12345", "b=12345"}, Limits{Bytes: 9}, "larger"},
		{"too many files", []string{"a", "b", "c"}, Limits{Files: 2}, "too many files"},
		{"a long part", []string{strings.Repeat("x", 256)}, Limits{}, "too long"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := apply(t, c.limits, pack(t, c.entries...)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q in it", err, c.want)
			}
		})
	}
	if _, err := apply(t, Limits{Layers: 1}, pack(t), pack(t)); err == nil || !strings.Contains(err.Error(), "layers") {
		t.Errorf("two layers: %v", err)
	}
}

// FuzzLayer unpacks random layers. Unpacking may fail but must not change
// anything outside its directory.
func FuzzLayer(f *testing.F) {
	f.Add(pack(f, "a/", "a/f=x", "l->/a", "l/g=y", "h=>a/f", "a/.wh.f"))
	f.Add(pack(f, "../outside=x"))
	f.Add(pack(f, "l->../..", "l/outside=x", "k->l", "k/.wh.outside"))
	f.Add(pack(f, "d/", "d/.wh..wh..opq", "d->..", "d/.wh.outside"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if dir, err := apply(t, Limits{Bytes: 1 << 16, Files: 100}, b); err == nil {
			tree(t, dir)
		}
	})
}

// FuzzAccounts looks up users in random /etc/passwd and /etc/group files.
func FuzzAccounts(f *testing.F) {
	f.Add("web", []byte("root:x:0:0:root:/root:/bin/sh\nweb:x:7:8::/w:\n"), []byte("more:x:9:web,b\n"))
	f.Add("1:2", []byte("::::"), []byte(":x"))
	f.Fuzz(func(t *testing.T, who string, passwd, group []byte) {
		u, err := lookup(who, parseAccounts(passwd), parseAccounts(group))
		if err == nil && (u.UID < 0 || u.GID < 0) {
			t.Errorf("%q is %+v", who, u)
		}
	})
}

func TestLookupUser(t *testing.T) {
	dir, err := apply(t, Limits{}, pack(t, "etc/", "etc/passwd=root:x:0:0:root:/root:/bin/sh\nweb:x:7:8::/w:\n", "real=more:x:9:a,web\nstaff:x:50:\n", "etc/group->/real"))
	if err != nil {
		t.Fatal(err)
	}
	for who, want := range map[string]User{
		"":        {Home: "/root"},
		"web":     {UID: 7, GID: 8, Home: "/w", Groups: []int{9}},
		"7":       {UID: 7, GID: 8, Home: "/w", Groups: []int{9}},
		"7:staff": {UID: 7, GID: 50, Home: "/w"},
		"123":     {UID: 123, Home: "/"},
		"123:45":  {UID: 123, GID: 45, Home: "/"},
	} {
		if got, err := LookupUser(dir, who); err != nil || !cmp.Equal(got, want) {
			t.Errorf("%q is %+v, %v, want %+v", who, got, err, want)
		}
	}
	for _, who := range []string{"nobody", "web:none", "-1", "99999999999"} {
		if got, err := LookupUser(dir, who); err == nil {
			t.Errorf("%q is %+v", who, got)
		}
	}
}

// sample returns an image of two layers.
func sample(t *testing.T) v1.Image {
	t.Helper()
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH, RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{Entrypoint: []string{"/bin/x"}, Cmd: []string{"-v"}, Env: []string{"A=1"}, WorkingDir: "/w", User: "web"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, entries := range [][]string{{"a=1", "b=1"}, {".wh.a", "c=2"}} {
		b := pack(t, entries...)
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.AppendLayers(img, l); err != nil {
			t.Fatal(err)
		}
	}
	return img
}

// TestSources checks that an image has the same files from every kind of source,
// and remains usable when the source is gone.
func TestSources(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	img := sample(t)
	srv := httptest.NewServer(registry.New())
	defer srv.Close()
	ref, err := name.ParseReference(strings.TrimPrefix(srv.URL, "http://") + "/some/image:v1")
	errtest.None(t, err)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(remote.Write(ref, img))
	saved := filepath.Join(dir, "saved.tar")
	must(tarball.WriteToFile(saved, ref, img))
	lay := filepath.Join(dir, "layout")
	p, err := layout.Write(lay, empty.Index)
	must(err)
	must(p.AppendImage(img, layout.WithPlatform(v1.Platform{OS: "linux", Architecture: runtime.GOARCH})))
	layTar := filepath.Join(dir, "layout.tar")
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	must(w.AddFS(os.DirFS(lay)))
	must(w.Close())
	must(os.WriteFile(layTar, b.Bytes(), 0o600))
	root := pack(t, "b=1", "c=2")
	rootTar := filepath.Join(dir, "root.tar")
	must(os.WriteFile(rootTar, root, 0o600))
	var z bytes.Buffer
	zw := gzip.NewWriter(&z)
	errtest.Get(zw.Write(root))(t)
	must(zw.Close())
	rootGz := filepath.Join(dir, "root.tar.gz")
	must(os.WriteFile(rootGz, z.Bytes(), 0o600))

	s, err := OpenStore(filepath.Join(dir, "store"), Limits{})
	must(err)
	want := map[string]string{"b": "1", "c": "2"}
	for _, src := range []string{ref.String(), saved, lay, layTar, rootTar, rootGz} {
		got, err := s.Get(ctx, src)
		if err != nil {
			t.Errorf("%s: %v", src, err)
			continue
		}
		if d := cmp.Diff(want, tree(t, got.Root)); d != "" {
			t.Errorf("%s: %s", src, d)
		}
		if c := got.Config; !strings.HasPrefix(filepath.Base(src), "root") && (c.User != "web" || strings.Join(c.Command(), " ") != "/bin/x -v") {
			t.Errorf("%s: config %+v", src, c)
		}
		again, err := s.Get(ctx, src)
		if err != nil || again.Root != got.Root {
			t.Errorf("%s a second time: %v, %v", src, again, err)
		}
	}
	srv.Close()
	if _, err := s.Get(ctx, ref.String()); err != nil {
		t.Errorf("without the registry: %v", err)
	}
	if got, err := s.Get(ctx, dir); err != nil || got.Root != dir {
		t.Errorf("a directory: %v, %v", got, err)
	}
	for _, bad := range []string{"", "no such reference!", filepath.Join(dir, "none"), "/dev/null", strings.TrimPrefix(srv.URL, "http://") + "/gone:v1"} {
		if _, err := s.Get(ctx, bad); err == nil || !strings.HasPrefix(err.Error(), "cannot use image") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	left, err := filepath.Glob(filepath.Join(s.Dir, "new-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestWrongLayer checks that a layer whose content does not match the image's
// digest is refused.
func TestWrongLayer(t *testing.T) {
	wrong := "sha256:" + strings.Repeat("0", 64)
	err := within(t.TempDir(), func(r *os.Root) error {
		return newUnpacker(r, Limits{}).layer(bytes.NewReader(pack(t, "a=1")), wrong)
	})
	if err == nil || !strings.Contains(err.Error(), wrong) {
		t.Errorf("%v", err)
	}
}

// TestChangedFile checks that a file that has changed is unpacked again.
func TestChangedFile(t *testing.T) {
	s, err := OpenStore(t.TempDir(), Limits{})
	if err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(t.TempDir(), "r.tar")
	for n := range 3 {
		next := fmt.Sprintf("%s.%d", at, n)
		errtest.None(t, errors.Join(os.WriteFile(next, pack(t, "f="+strings.Repeat("x", n)), 0o600), os.Rename(next, at)))
		img, err := s.Get(context.Background(), at)
		errtest.None(t, err)
		if got := tree(t, img.Root)["f"]; got != strings.Repeat("x", n) {
			t.Errorf("file %d holds %q", n, got)
		}
	}
}

func TestStopSignal(t *testing.T) {
	for said, want := range map[string]syscall.Signal{"": syscall.SIGTERM, "SIGINT": syscall.SIGINT, "quit": syscall.SIGQUIT, "9": syscall.SIGKILL,
		"SIGRTMIN+3": 37, "RTMIN": 34} {
		if got, err := (Config{StopSignal: said}).Signal(); err != nil || got != want {
			t.Errorf("%q is %v, %v", said, got, err)
		}
	}
	for _, said := range []string{"SIGNOT", "0", "65", "-1", "RTMIN+99", "RTMIN+x", "SIG", " "} {
		if got, err := (Config{StopSignal: said}).Signal(); err == nil || !strings.Contains(err.Error(), "stop signal") {
			t.Errorf("%q is %v, %v", said, got, err)
		}
	}
}

// TestLargeConfig checks that an image is refused if a part that would be read
// into memory, such as its config, is huge, whatever that part is named.
func TestLargeConfig(t *testing.T) {
	s, err := OpenStore(t.TempDir(), Limits{})
	if err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(t.TempDir(), "saved.tar")
	b := pack(t, `manifest.json=[{"Config":"blobs/sha256/c0","Layers":[]}]`, "blobs/sha256/c0="+strings.Repeat(" ", maxMeta+1))
	errtest.None(t, os.WriteFile(at, b, 0o600))
	if _, err := s.Get(t.Context(), at); err == nil || !strings.Contains(err.Error(), fmt.Sprint(maxMeta)) {
		t.Errorf("of an archive: %v", err)
	}

	manifest := fmt.Sprintf(`{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json","size":%d,"digest":"sha256:%064d"},"layers":[]}`, int64(1)<<40, 0)
	asked := false
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		switch {
		case strings.Contains(q.URL.Path, "/manifests/"):
			w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
			fmt.Fprint(w, manifest)
		case strings.Contains(q.URL.Path, "/blobs/"):
			asked = true
		}
	}))
	defer srv.Close()
	if _, err := s.Get(t.Context(), strings.TrimPrefix(srv.URL, "http://")+"/huge:v1"); err == nil || !strings.Contains(err.Error(), fmt.Sprint(maxMeta)) || asked {
		t.Errorf("of a registry: %v, asked %v", err, asked)
	}
}

// TestSilentRegistry checks that a registry that stops sending in the middle of
// a layer times out, and that no part of the image remains.
func TestSilentRegistry(t *testing.T) {
	real := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	var silent atomic.Bool
	end := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if silent.Load() && strings.Contains(q.URL.Path, "/blobs/") {
			_, _ = w.Write([]byte{0x1f}) // the listener may have closed
			_ = http.NewResponseController(w).Flush()
			<-end
			return
		}
		real.ServeHTTP(w, q)
	}))
	defer srv.Close()
	defer close(end)
	ref, err := name.ParseReference(strings.TrimPrefix(srv.URL, "http://") + "/some/image:v1")
	errtest.None(t, err)
	errtest.None(t, remote.Write(ref, sample(t)))
	s, err := OpenStore(t.TempDir(), Limits{})
	if err != nil {
		t.Fatal(err)
	}
	s.Stall = 50 * time.Millisecond
	silent.Store(true)
	if _, err := s.Get(t.Context(), ref.String()); err == nil || !strings.Contains(err.Error(), s.Stall.String()) {
		t.Errorf("%v", err)
	}
	for _, dir := range []string{"new-*", "images/*"} {
		if left, err := filepath.Glob(filepath.Join(s.Dir, dir)); err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
	}
	s.Stall = time.Minute
	silent.Store(false)
	if _, err := s.Get(t.Context(), ref.String()); err != nil {
		t.Errorf("when it talks again: %v", err)
	}
}

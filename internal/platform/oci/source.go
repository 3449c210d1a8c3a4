package oci

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"
)

// maxMeta limits files that are read whole: index, manifest and config, in bytes.
const maxMeta = 4 << 20

// kind is the format of a file or directory.
type kind string

const (
	rootDir   kind = "directory"
	layoutDir kind = "OCI layout"
	layoutTar kind = "OCI layout in a tar"
	saved     kind = "docker-save archive"
	rootTar   kind = "tar of a root file system"
)

// kindOf determines the format of a path. It checks the size of every metadata
// file that is later read whole.
func kindOf(path string) (kind, error) {
	st, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	if st.IsDir() {
		if _, err := os.Stat(filepath.Join(path, "oci-layout")); err == nil {
			return layoutDir, nil
		}
		return rootDir, nil
	}
	if !st.Mode().IsRegular() {
		return "", errors.New("it is neither a file nor a directory")
	}
	k := rootTar
	err = eachEntry(path, func(h *tar.Header, _ io.Reader) error {
		switch filepath.Clean(h.Name) {
		case "oci-layout":
			if k == rootTar {
				k = layoutTar
			}
		case "manifest.json": // docker save writes this and a layout; either works
			k = saved
		}
		if k != rootTar && filepath.Ext(h.Name) == ".json" && h.Size > maxMeta {
			return fmt.Errorf("%s is too large: %d bytes, the limit is %d", h.Name, h.Size, maxMeta)
		}
		return nil
	})
	return k, err
}

// maxEntries limits the entries of a tar that is only scanned, not unpacked.
const maxEntries = 5_000_000

// eachEntry iterates over a tar, gzip-compressed or not.
func eachEntry(path string, do func(h *tar.Header, r io.Reader) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	r, err := plain(f)
	if err != nil {
		return err
	}
	t := tar.NewReader(r)
	for range maxEntries {
		h, err := t.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := do(h, t); err != nil {
			return err
		}
	}
	return errors.New("it has too many entries")
}

// plain returns a reader of f's decompressed content. For an uncompressed file it
// is seekable, which tar readers use to skip content.
func plain(f *os.File) (io.Reader, error) {
	var magic [2]byte
	n, err := f.ReadAt(magic[:], 0)
	if err != nil && err != io.EOF {
		return nil, err
	}
	if n == 2 && magic == [2]byte{0x1f, 0x8b} {
		return gzip.NewReader(f)
	}
	return f, nil
}

// fromLayout returns the image for this machine's platform from a layout.
func fromLayout(dir string) (v1.Image, error) {
	small := func(parts ...string) error {
		p := filepath.Join(append([]string{dir}, parts...)...)
		st, err := os.Stat(p)
		if err != nil {
			return err
		}
		if !st.Mode().IsRegular() || st.Size() > maxMeta {
			return fmt.Errorf("%s is not a file of at most %d bytes", filepath.Join(parts...), maxMeta)
		}
		return nil
	}
	if err := small("index.json"); err != nil {
		return nil, err
	}
	ix, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, err
	}
	for range 4 { // indexes may be nested
		m, err := ix.IndexManifest()
		if err != nil {
			return nil, err
		}
		d, err := choose(m.Manifests)
		if err != nil {
			return nil, err
		}
		if err := small("blobs", d.Digest.Algorithm, d.Digest.Hex); err != nil {
			return nil, err
		}
		if !d.MediaType.IsIndex() {
			img, err := ix.Image(d.Digest)
			if err != nil {
				return nil, err
			}
			mf, err := img.Manifest()
			if err != nil {
				return nil, err
			}
			return img, small("blobs", mf.Config.Digest.Algorithm, mf.Config.Digest.Hex)
		}
		if ix, err = ix.ImageIndex(d.Digest); err != nil {
			return nil, err
		}
	}
	return nil, errors.New("its indexes are nested too deeply")
}

// choose returns the manifest for this machine's platform, or the only one.
func choose(all []v1.Descriptor) (v1.Descriptor, error) {
	all = slices.DeleteFunc(slices.Clone(all), func(d v1.Descriptor) bool { return !d.MediaType.IsImage() && !d.MediaType.IsIndex() })
	for _, d := range all {
		if d.Platform != nil && d.Platform.OS == "linux" && d.Platform.Architecture == runtime.GOARCH {
			return d, nil
		}
	}
	if len(all) == 1 && (all[0].Platform == nil || all[0].Platform.OS == "" || all[0].MediaType.IsIndex()) {
		return all[0], nil
	}
	return v1.Descriptor{}, fmt.Errorf("it has no image for linux/%s", runtime.GOARCH)
}

// CheckReference returns an error unless ref is a valid image reference.
func CheckReference(ref string) error {
	if strings.HasPrefix(ref, ".") {
		return errors.New("it is neither an absolute path nor a reference: it begins with a dot")
	}
	if _, err := name.ParseReference(ref); err != nil {
		return fmt.Errorf("it is neither an absolute path nor a reference: %w", err)
	}
	return nil
}

// patient returns a transport whose connections fail if a read receives nothing
// for the duration of stall.
func patient(stall time.Duration) http.RoundTripper {
	t := remote.DefaultTransport.(*http.Transport).Clone()
	dial := t.DialContext
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &patientConn{c, stall}, nil
	}
	// With HTTP/2, the transport reads ahead, so the connection's silence would
	// prove nothing.
	t.ForceAttemptHTTP2, t.TLSNextProto = false, map[string]func(string, *tls.Conn) http.RoundTripper{}
	return t
}

type patientConn struct {
	net.Conn
	stall time.Duration
}

func (c *patientConn) Read(p []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(c.stall)); err != nil {
		return 0, err
	}
	n, err := c.Conn.Read(p)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("no data for %s: %w", c.stall, err)
	}
	return n, err
}

// fromRegistry returns an image from a registry, with the credentials of the
// user's Docker configuration.
func fromRegistry(ctx context.Context, ref string, stall time.Duration) (v1.Image, error) {
	r, err := name.ParseReference(ref)
	if err != nil {
		return nil, fmt.Errorf("it is neither an absolute path nor a reference: %w", err)
	}
	img, err := remote.Image(r, remote.WithContext(ctx), remote.WithTransport(patient(stall)), remote.WithAuthFromKeychain(authn.DefaultKeychain),
		remote.WithPlatform(v1.Platform{OS: "linux", Architecture: runtime.GOARCH}))
	if err != nil {
		return nil, err
	}
	m, err := img.Manifest()
	if err != nil {
		return nil, err
	}
	if m.Config.Size > maxMeta { // read whole
		return nil, fmt.Errorf("its configuration has %d bytes, the limit is %d", m.Config.Size, maxMeta)
	}
	return img, nil
}

// fromSaved reads a docker-save archive with one image.
func fromSaved(path string) (v1.Image, error) {
	open := func() (io.ReadCloser, error) {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		r, err := plain(f)
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return readCloser{r, f}, nil
	}
	m, err := tarball.LoadManifest(open)
	if err != nil {
		return nil, err
	}
	err = eachEntry(path, func(h *tar.Header, _ io.Reader) error {
		for _, d := range m {
			if h.Size > maxMeta && filepath.Clean(h.Name) == filepath.Clean(d.Config) {
				return fmt.Errorf("its configuration has %d bytes, the limit is %d", h.Size, maxMeta)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return tarball.Image(open, nil)
}

type readCloser struct {
	io.Reader
	io.Closer
}

// Config is an image's run configuration.
type Config struct {
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
	Env        []string `json:"env,omitempty"`
	WorkingDir string   `json:"working_dir,omitempty"`
	User       string   `json:"user,omitempty"`
	StopSignal string   `json:"stop_signal,omitempty"`
}

// Command returns the image's command.
func (c Config) Command() []string { return slices.Concat(c.Entrypoint, c.Cmd) }

// Args returns the command to run: asked, or the image's command if asked is
// empty.
func (c Config) Args(asked []string) []string {
	if len(asked) > 0 {
		return asked
	}
	return c.Command()
}

// Dir returns the working directory: asked, or the image's if asked is empty.
func (c Config) Dir(asked string) string {
	if asked != "" {
		return asked
	}
	if filepath.IsAbs(c.WorkingDir) {
		return c.WorkingDir
	}
	return "/"
}

// defaults is the environment of programs with their own root. The image's
// variables override it, and the user's override both.
var defaults = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"}

// rtMin is the first real-time signal that the C library leaves to programs.
const rtMin = 34

// Signal returns the image's stop signal, SIGTERM if it has none. An image names
// it as SIGINT, INT, SIGRTMIN+3 or by number.
func (c Config) Signal() (syscall.Signal, error) {
	if c.StopSignal == "" {
		return syscall.SIGTERM, nil
	}
	name := strings.TrimPrefix(strings.ToUpper(c.StopSignal), "SIG")
	n, err := strconv.Atoi(name)
	if more, ok := strings.CutPrefix(name, "RTMIN"); ok {
		n = rtMin
		if more != "" {
			n, err = strconv.Atoi(strings.TrimPrefix(more, "+"))
			n += rtMin
		} else {
			err = nil
		}
	} else if err != nil {
		n, err = int(unix.SignalNum("SIG"+name)), nil
	}
	if err != nil || n < 1 || n > 64 {
		return 0, fmt.Errorf("cannot use the image's stop signal: %.50q is not a signal", c.StopSignal)
	}
	return syscall.Signal(n), nil
}

// Environ returns a program's environment: the defaults, its user's home, the
// image's variables, those in asked and those in own. Later ones override earlier
// ones. A copy of the defaults at the start of asked is ignored. LULL_SOCKET in
// asked is dropped, because it is a path of the host. So is any entry without the
// form KEY=VALUE, because runc would not start with it.
func (c Config) Environ(home string, asked []string, own ...string) []string {
	var keys []string
	set := map[string]string{}
	add := func(list []string) {
		for _, e := range list {
			k, _, ok := strings.Cut(e, "=")
			if !ok || k == "" {
				continue
			}
			if _, ok := set[k]; !ok {
				keys = append(keys, k)
			}
			set[k] = e
		}
	}
	add(defaults)
	if home != "" {
		add([]string{"HOME=" + home})
	}
	add(c.Env)
	if len(asked) >= len(defaults) && slices.Equal(asked[:len(defaults)], defaults) {
		asked = asked[len(defaults):]
	}
	for _, e := range asked {
		if !strings.HasPrefix(e, "LULL_SOCKET=") {
			add([]string{e})
		}
	}
	add(own)
	out := make([]string, 0, len(keys))
	for _, k := range keys {
		out = append(out, set[k])
	}
	return out
}

func configOf(f *v1.ConfigFile) Config {
	return Config{f.Config.Entrypoint, f.Config.Cmd, f.Config.Env, f.Config.WorkingDir, f.Config.User, f.Config.StopSignal}
}

// readConfig reads a config that save wrote.
func readConfig(path string) (c Config, err error) {
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	return c, err
}

// Image packs a static lull as a container image: a tar that is both an OCI
// layout and what docker save writes, so that docker load and podman load take
// it. The same program gives the same bytes; every time in it is that of
// SOURCE_DATE_EPOCH.
//
//	go run ./bench/image -version 1.2.3 -arch arm64 FILE >lull.tar
//
// Certificate authorities are those of Mozilla (MPL-2.0), as Debian's package
// ca-certificates has them, from the module golang.org/x/crypto/x509roots.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"encoding/pem"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// UID that runs lull in the image, where it has no name.
const user = 65532

func main() {
	version := flag.String("version", "dev", "version of the program")
	arch := flag.String("arch", "amd64", "its architecture, as Go names it")
	flag.Parse()
	if err := run(*version, *arch, flag.Arg(0), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(version, arch, file string, w io.Writer) error {
	epoch, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH %q: not a number of seconds", os.Getenv("SOURCE_DATE_EPOCH"))
	}
	program, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	at := time.Unix(epoch, 0).UTC()
	img, err := of(program, version, arch, at)
	if err != nil {
		return err
	}
	return write(w, img, "lull:"+regexp.MustCompile(`[^\w.-]`).ReplaceAllString(version, "-"), at)
}

// of returns the image of a program.
func of(program []byte, version, arch string, at time.Time) (v1.Image, error) {
	var files bytes.Buffer
	tw := tar.NewWriter(&files)
	for _, f := range []struct {
		name        string
		mode, owner int
		data        []byte
	}{
		{"data/", 0o700, user, nil},
		{"etc/", 0o755, 0, nil}, {"etc/ssl/", 0o755, 0, nil}, {"etc/ssl/certs/", 0o755, 0, nil},
		{"etc/ssl/certs/ca-certificates.crt", 0o644, 0, authorities()},
		{"lull", 0o755, 0, program},
		{"tmp/", 0o1777, 0, nil},
	} {
		if err := put(tw, f.name, f.mode, f.owner, at, f.data); err != nil {
			return nil, err
		}
	}
	if err := tw.Close(); err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(files.Bytes())), nil },
		tarball.WithMediaType(types.OCILayer), tarball.WithCompressionLevel(gzip.BestCompression))
	if err != nil {
		return nil, err
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err = mutate.ConfigFile(img, &v1.ConfigFile{OS: "linux", Architecture: arch, Created: v1.Time{Time: at}, RootFS: v1.RootFS{Type: "layers"}, Config: v1.Config{
		User: fmt.Sprintf("%d:%[1]d", user), Volumes: map[string]struct{}{"/data": {}}, ExposedPorts: map[string]struct{}{"7070/tcp": {}},
		Entrypoint: []string{"/lull"},
		// Clients connect to the container's own interface, so it listens on all
		// addresses. TLS is terminated in front, or enabled with --tls-cert and
		// --tls-key.
		Cmd:    []string{"server", "--data", "/data", "--listen", "0.0.0.0:7070", "--insecure", "--admin-token-file", "/data/admin-token"},
		Labels: map[string]string{"org.opencontainers.image.title": "lull", "org.opencontainers.image.version": version},
	}})
	if err != nil {
		return nil, err
	}
	return mutate.Append(img, mutate.Addendum{Layer: layer, History: v1.History{Created: v1.Time{Time: at}, CreatedBy: "lull release"}})
}

// authorities returns certificates in PEM. It omits those that are trusted only
// for chains issued before a date, because a file of certificates cannot express
// that.
func authorities() []byte {
	var b bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			_ = pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}) // a bytes.Buffer cannot fail
		}
	}
	return b.Bytes()
}

// write writes an image to w as a tar, with name as its name and tag.
func write(w io.Writer, img v1.Image, name string, at time.Time) error {
	manifest, err := img.RawManifest()
	if err != nil {
		return err
	}
	m, err := img.Manifest()
	if err != nil {
		return err
	}
	config, err := img.RawConfigFile()
	if err != nil {
		return err
	}
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	digest, err := img.Digest()
	if err != nil {
		return err
	}
	blob := func(h v1.Hash) string { return "blobs/sha256/" + h.Hex }
	files := map[string][]byte{blob(digest): manifest, blob(m.Config.Digest): config, "oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`)}
	var paths []string
	for i, l := range layers {
		r, err := l.Compressed()
		if err != nil {
			return err
		}
		path := blob(m.Layers[i].Digest)
		if files[path], err = io.ReadAll(r); err != nil {
			return err
		}
		paths = append(paths, path)
	}
	for path, v := range map[string]any{
		"index.json": v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{{
			MediaType: types.OCIManifestSchema1, Digest: digest, Size: int64(len(manifest)), Annotations: map[string]string{
				"io.containerd.image.name": "docker.io/library/" + name, "org.opencontainers.image.ref.name": name}}}},
		"manifest.json": tarball.Manifest{{Config: blob(m.Config.Digest), RepoTags: []string{name}, Layers: paths}},
	} {
		if files[path], err = json.Marshal(v); err != nil {
			return err
		}
	}
	tw := tar.NewWriter(w)
	for _, path := range []string{"blobs/", "blobs/sha256/"} {
		if err := put(tw, path, 0o755, 0, at, nil); err != nil {
			return err
		}
	}
	for _, path := range slices.Sorted(maps.Keys(files)) {
		if err := put(tw, path, 0o644, 0, at, files[path]); err != nil {
			return err
		}
	}
	return tw.Close()
}

// put adds a file to the tar, or a directory if name ends with a slash.
func put(tw *tar.Writer, name string, mode, owner int, at time.Time, data []byte) error {
	kind := byte(tar.TypeReg)
	if name[len(name)-1] == '/' {
		kind = tar.TypeDir
	}
	if err := tw.WriteHeader(&tar.Header{Typeflag: kind, Name: name, Mode: int64(mode), Uid: owner, Gid: owner, ModTime: at, Size: int64(len(data)), Format: tar.FormatUSTAR}); err != nil {
		return err
	}
	_, err := tw.Write(data)
	return err
}

package docker

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"path"

	"lull/internal/core/instance"
	"lull/internal/lib/tartree"
)

// FilesAwake implements instance.FileKeeper. Docker copies files also of a paused
// or stopped container.
func (r *Runtime) FilesAwake() bool { return false }

// ReadFiles implements instance.FileKeeper.
func (r *Runtime) ReadFiles(ctx context.Context, id, at string, w io.Writer) (begun bool, err error) {
	c, err := r.container(id)
	if err != nil {
		return false, err
	}
	if st, err := r.api.stat(ctx, c, at); err != nil {
		return false, err
	} else if st.Mode&fs.ModeSymlink != 0 {
		at = st.LinkTarget // Docker has resolved it inside the container
	}
	a, err := r.api.send(ctx, http.MethodGet, archive(c), url.Values{"path": {at}}, nil)
	if err != nil {
		return false, missing(err)
	}
	defer a.Body.Close()
	_, err = io.Copy(w, a.Body)
	return true, err
}

// WriteFiles implements instance.FileKeeper.
func (r *Runtime) WriteFiles(ctx context.Context, id, at string, in io.Reader) error {
	c, err := r.container(id)
	if err != nil {
		return err
	}
	st, err := r.api.stat(ctx, c, at)
	if err == nil && st.Mode&fs.ModeSymlink != 0 {
		at = st.LinkTarget
		st, err = r.api.stat(ctx, c, at)
	}
	if err != nil && !errors.Is(err, tartree.ErrNoPath) {
		return err
	}
	if err != nil || !st.Mode.IsDir() {
		from, as := in, path.Base(at)
		pr, pw := io.Pipe()
		defer pr.Close()
		go func() { pw.CloseWithError(tartree.Rename(pw, from, as)) }()
		in, at = pr, path.Dir(at)
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPut, "http://docker"+archive(c)+"?"+url.Values{"path": {at}, "noOverwriteDirNonDir": {"1"}}.Encode(), in)
	if err != nil {
		return err
	}
	q.Header.Set("Content-Type", "application/x-tar")
	a, err := r.api.http.Do(q)
	if err != nil {
		return fmt.Errorf("copy files into the container: %w", err)
	}
	if a.StatusCode >= 300 {
		return missing(readStatus(a))
	}
	return a.Body.Close()
}

func archive(container string) string { return "/containers/" + url.PathEscape(container) + "/archive" }

// missing turns Docker's error about a path that does not exist into
// tartree.ErrNoPath.
func missing(err error) error {
	if isStatus(err, http.StatusNotFound) {
		return errors.Join(tartree.ErrNoPath, err)
	}
	return err
}

// pathStat is Docker's description of a file in a container.
type pathStat struct {
	Mode       fs.FileMode `json:"mode"`
	LinkTarget string      `json:"linkTarget"`
}

func (c *client) stat(ctx context.Context, container, at string) (st pathStat, err error) {
	a, err := c.send(ctx, http.MethodHead, archive(container), url.Values{"path": {at}}, nil)
	if err != nil {
		return st, missing(err)
	}
	a.Body.Close()
	b, err := base64.StdEncoding.DecodeString(a.Header.Get("X-Docker-Container-Path-Stat"))
	if err == nil {
		err = json.Unmarshal(b, &st)
	}
	if err != nil {
		return st, fmt.Errorf("read what Docker says about %s: %w", at, err)
	}
	return st, nil
}

var _ instance.FileKeeper = (*Runtime)(nil)

package oci

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
)

// maxLinks is the maximum number of symbolic links in a path, as in the kernel.
const maxLinks = 40

// resolve follows the symbolic links of name as a process with root directory
// root would: an absolute link starts at root, and .. does not lead above it.
// Elements after the first missing one are returned unchanged. The result is
// relative to root, contains no link, and is "." for root itself.
func resolve(root *os.Root, name string) (string, error) {
	links := 0
	done := "." // resolved so far
	todo := strings.Split(path.Clean("/" + name)[1:], "/")
	for len(todo) > 0 {
		part := todo[0]
		todo = todo[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			done = path.Dir(done)
			continue
		}
		next := path.Join(done, part)
		st, err := root.Lstat(next)
		if errors.Is(err, fs.ErrNotExist) {
			// Nothing exists below a missing element, so a later .. only removes
			// names.
			done = next
			continue
		}
		if err != nil {
			return "", err
		}
		if st.Mode()&fs.ModeSymlink == 0 {
			done = next
			continue
		}
		if links++; links > maxLinks {
			return "", fmt.Errorf("%s leads through more than %d links", name, maxLinks)
		}
		to, err := root.Readlink(next)
		if err != nil {
			return "", err
		}
		if path.IsAbs(to) {
			done = "."
		}
		todo = append(strings.Split(to, "/"), todo...)
		if len(todo) > maxPath {
			return "", fmt.Errorf("%s resolves to a path that is too long", name)
		}
	}
	return done, nil
}

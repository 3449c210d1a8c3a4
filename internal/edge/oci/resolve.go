package oci

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
)

// maxLinks is how many symbolic links one name may lead through, as in the kernel.
const maxLinks = 40

// resolve follows the symbolic links of name as a process would whose root is
// root: an absolute link starts at root, and .. stops there. What does not
// exist ends the search: the rest is returned as it is. The result has no link
// in it, relative to root, and is "." for root itself.
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
			// Nothing below it exists, so a later .. only takes names away.
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
			return "", fmt.Errorf("%s leads through too long a path", name)
		}
	}
	return done, nil
}

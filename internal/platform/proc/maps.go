package proc

import (
	"bytes"
	"errors"
)

var errMaps = errors.New("not a list of mappings")

// SharedFiles returns the paths of the files that a process has mapped shared and
// writable. A file with several such mappings is listed once for each. It returns
// ErrGone if the process does not exist.
func (f *FS) SharedFiles(pid int) ([]string, error) {
	s := f.scratch().num(pid).str("/maps")
	defer s.free()
	b, err := s.read()
	if err != nil {
		return nil, err
	}
	files, err := parseSharedFiles(b)
	if err != nil {
		return nil, s.fail(err)
	}
	return files, nil
}

// parseSharedFiles parses the lines of a maps file: range, permissions, offset,
// device, inode, and the path, which may contain spaces.
func parseSharedFiles(b []byte) (files []string, err error) {
	for line := range bytes.Lines(b) {
		line = bytes.TrimRight(line, "\n")
		if len(line) == 0 {
			continue
		}
		_, rest := field(line)
		mode, rest := field(rest)
		_, rest = field(rest)
		_, rest = field(rest)
		inode, rest := field(rest)
		n, _, ok := number(inode)
		if len(mode) != 4 || !ok {
			return nil, errMaps
		}
		if mode[1] == 'w' && mode[3] == 's' && n > 0 {
			files = append(files, string(bytes.TrimLeft(rest, " ")))
		}
	}
	return files, nil
}

package oci

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
)

// User is the identity a program of an image runs as.
type User struct {
	UID, GID int
	Groups   []int // besides GID
	Home     string
}

// maxAccounts limits an image's /etc/passwd and /etc/group, in bytes.
const maxAccounts = 4 << 20

// LookupUser resolves "name", "uid", "name:group" or "uid:gid" with the accounts
// in the root file system at root. An empty who means root. Numeric ids need not
// exist.
func LookupUser(root, who string) (User, error) {
	r, err := os.OpenRoot(root)
	if err != nil {
		return User{}, fmt.Errorf("cannot look up the user: %w", err)
	}
	defer r.Close()
	passwd, err := accounts(r, "etc/passwd")
	if err != nil {
		return User{}, err
	}
	group, err := accounts(r, "etc/group")
	if err != nil {
		return User{}, err
	}
	if who == "" {
		who = "0"
	}
	return lookup(who, passwd, group)
}

// accounts reads a file of colon-separated lines; a missing file is empty.
func accounts(r *os.Root, name string) ([][]string, error) {
	at, err := resolve(r, name)
	if err != nil {
		return nil, fmt.Errorf("cannot read %s of the image: %w", name, err)
	}
	st, err := r.Lstat(at)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil && !st.Mode().IsRegular() {
		err = errors.New("not a regular file")
	}
	if err != nil {
		return nil, fmt.Errorf("cannot read %s of the image: %w", name, err)
	}
	f, err := r.Open(at)
	if err != nil {
		return nil, fmt.Errorf("cannot read %s of the image: %w", name, err)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxAccounts))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("cannot read %s of the image: %w", name, err)
	}
	return parseAccounts(b), nil
}

func parseAccounts(b []byte) (out [][]string) {
	s := bufio.NewScanner(bytes.NewReader(b))
	s.Buffer(nil, maxAccounts+1)
	for s.Scan() {
		if f := strings.Split(strings.TrimSpace(s.Text()), ":"); len(f) >= 3 && f[0] != "" && f[0][0] != '#' {
			out = append(out, f)
		}
	}
	return out
}

func number(s string) (int, bool) {
	n, err := strconv.ParseUint(s, 10, 31)
	return int(n), err == nil
}

func lookup(who string, passwd, group [][]string) (User, error) {
	name, groupName, hasGroup := strings.Cut(who, ":")
	u, found := User{Home: "/"}, false
	login := ""
	uid, numeric := number(name)
	for _, f := range passwd {
		id, ok := number(f[2])
		if !ok || !(f[0] == name || numeric && id == uid) {
			continue
		}
		u.UID, login, found = id, f[0], true
		if len(f) > 3 {
			u.GID, _ = number(f[3])
		}
		if len(f) > 5 && f[5] != "" {
			u.Home = f[5]
		}
		break
	}
	if !found {
		if !numeric {
			return User{}, fmt.Errorf("cannot run as %s: the image has no such user", who)
		}
		u.UID = uid
	}
	if hasGroup {
		gid, ok := number(groupName)
		for _, f := range group {
			if f[0] == groupName {
				gid, ok = number(f[2])
			}
		}
		if !ok {
			return User{}, fmt.Errorf("cannot run as %s: the image has no such group", who)
		}
		u.GID = gid
		return u, nil
	}
	for _, f := range group {
		gid, ok := number(f[2])
		if !ok || gid == u.GID || len(f) < 4 || login == "" {
			continue
		}
		for m := range strings.SplitSeq(f[3], ",") {
			if m == login {
				u.Groups = append(u.Groups, gid)
				break
			}
		}
	}
	return u, nil
}

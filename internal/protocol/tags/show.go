package tags

import (
	"net/url"
	"strings"
)

// hidden stands for what is not shown of a value.
const hidden = "…"

// Show returns what of a setting's value may stand where many can read it: in
// a status, a history, a log or a report to a server. A command may hold a
// password and an address a token, so that of one only its program is shown and
// of the other its host. The value of a name that is no setting is not shown at
// all: a misspelt one may be either.
func Show(name, value string) string {
	f := find(name)
	switch {
	case f == nil:
		return hide(value)
	case f.show != nil:
		return f.show(value)
	}
	return value
}

// private has only what show leaves of its values be seen.
func private(f Field, show func(string) string) Field {
	f.show = show
	return f
}

func hide(value string) string {
	if value == "" {
		return ""
	}
	return hidden
}

// plain are the letters of a program's name or path; anything else may be
// syntax of the shell.
const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./+-"

// Program is the program of a shell command without what it is given: an
// argument or an assignment before it may be a password.
func Program(command string) string {
	words := strings.Fields(command)
	if len(words) == 0 || strings.Trim(words[0], plain) != "" {
		return hide(command)
	}
	if len(words) == 1 {
		return words[0]
	}
	return words[0] + " " + hidden
}

// site is the scheme and host of an address.
func site(address string) string {
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return hide(address)
	}
	if whole := u.Scheme + "://" + u.Host; whole == strings.TrimSuffix(address, "/") {
		return address
	}
	return u.Scheme + "://" + u.Host + "/" + hidden
}

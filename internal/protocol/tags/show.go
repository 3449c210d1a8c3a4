package tags

import (
	"net/url"
	"strings"
)

// hidden stands for the part of a value that is not shown.
const hidden = "…"

// Show returns the part of a setting's value that may appear where many can read
// it: in a status, a history, a log or a report to a server. A command may
// contain a password and an address may contain a token, so only the program and
// the host are shown. The value of an unknown setting is not shown at all,
// because its name may be a misspelling of one that contains a secret.
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

// private returns f with show as its function for the part of a value that may be
// shown.
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

// plain are the characters of a program's name or path; anything else may be
// shell syntax.
const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./+-"

// Program returns the program of a shell command. It omits the arguments, and
// assignments before the program, which may contain passwords.
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

// site returns the scheme and host of an address.
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

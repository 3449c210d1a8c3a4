package launch

import (
	"crypto/hmac"
	_ "embed"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"lull/internal/fleet/worker"
)

// maxUserData is EC2's limit of user data, in bytes before encoding.
const maxUserData = 16 << 10

// enrollPrefix begins every enrollment secret.
const enrollPrefix = "lullenroll_"

// secretHere stands for the enrollment secret in stored user data. The secret, a
// signature with the sealing key, is never stored.
const secretHere = "@secret@"

// ErrEnrollment covers every invalid enrollment secret, so that the caller does not
// learn the reason.
var ErrEnrollment = errors.New("cannot accept the enrollment secret: it is unknown or of an earlier launch")

//go:embed userdata.sh
var agentScript string

// agentUserData returns the user data of a launch that runs the template's own user
// data and then installs and enrolls the agent. It contains secretHere in place of
// the secret.
func (l *Launches) agentUserData(own string) (string, error) {
	s := l.settings()
	switch {
	case s.AgentServerURL == "":
		return "", errors.New("the template asks for the agent, and agent_server_url is not set")
	case l.seal == nil:
		return "", errors.New("the template asks for the agent, and there is no sealing key, which signs enrollment secrets")
	}
	script := strings.NewReplacer("@server@", strings.TrimSuffix(s.AgentServerURL, "/"), "@ca@", strings.TrimSpace(s.AgentServerCA)).Replace(agentScript)
	out := script
	if own != "" {
		var err error
		if out, err = mergeUserData(own, script); err != nil {
			return "", err
		}
	}
	if n := len(out) - len(secretHere) + secretMost; n > maxUserData {
		return "", fmt.Errorf("user data with the agent's part has %d bytes, EC2's limit is %d", n, maxUserData)
	}
	return out, nil
}

// secretMost is the maximum length of an enrollment secret.
const secretMost = len(enrollPrefix) + 16 + 1 + 20 + 1 + 64

// userDataTypes maps the first bytes of user data to those formats of cloud-init that
// can be combined with the agent's script.
var userDataTypes = []struct{ begins, mime string }{
	{"#!", "text/x-shellscript"},
	{"#cloud-config", "text/cloud-config"},
	{"#cloud-boothook", "text/cloud-boothook"},
	{"#include", "text/x-include-url"},
}

// userDataType returns the MIME type of user data; empty if it cannot be
// combined with the agent's script.
func userDataType(own string) string {
	for _, t := range userDataTypes {
		if strings.HasPrefix(own, t.begins) {
			return t.mime
		}
	}
	return ""
}

// mergeUserData returns a MIME archive for cloud-init with both parts.
func mergeUserData(own, script string) (string, error) {
	const boundary = "lull-user-data-part"
	kind := userDataType(own)
	if kind == "" {
		return "", errors.New("user_data is neither a script (#!), #cloud-config, #cloud-boothook nor #include, and cannot be combined with the agent's part")
	}
	encoding := "7bit"
	if strings.Contains(own, boundary) || strings.ContainsFunc(own, func(r rune) bool { return r > 0x7e }) {
		encoding, own = "base64", base64.StdEncoding.EncodeToString([]byte(own))
	}
	part := func(kind, encoding, name, text string) string {
		return "--" + boundary + "\nContent-Type: " + kind + "; charset=\"utf-8\"\nContent-Transfer-Encoding: " + encoding +
			"\nContent-Disposition: attachment; filename=\"" + name + "\"\n\n" + text + "\n"
	}
	return "Content-Type: multipart/mixed; boundary=\"" + boundary + "\"\nMIME-Version: 1.0\n\n" +
		part(kind, encoding, "10-template", own) + part("text/x-shellscript", "7bit", "90-lull-agent", script) + "--" + boundary + "--\n", nil
}

// EnrollSecret returns the secret with which the machine of a worker's launch
// enrolls. It is the same for every attempt of that launch, because a retry must send
// exactly the same user data.
func (l *Launches) EnrollSecret(worker string, generation int64) (string, error) {
	if l.seal == nil {
		return "", errors.New("cannot sign an enrollment secret without a sealing key")
	}
	text := worker + "_" + strconv.FormatInt(generation, 10)
	return enrollPrefix + text + "_" + hex.EncodeToString(l.seal.MAC("enroll:"+l.fleet+":"+text)), nil
}

// LaunchCall returns the parameters of w's launch as they are sent. If the launch
// installs the agent, the user data contains the enrollment secret.
func (l *Launches) LaunchCall(w *worker.Worker) (worker.Launch, error) {
	call := *w.Launch
	if !call.Agent {
		return call, nil
	}
	secret, err := l.EnrollSecret(w.ID, call.Generation)
	i := strings.LastIndex(call.UserData, secretHere) // the last one, because the agent's part comes last
	if err != nil || i < 0 {
		return call, errors.Join(err, errors.New("the user data has no place for the enrollment secret"))
	}
	call.UserData = call.UserData[:i] + secret + call.UserData[i+len(secretHere):]
	return call, nil
}

// LaunchUserData returns the user data of a launch from t in the form that is stored.
func (l *Launches) LaunchUserData(t Template) (string, error) {
	if !t.Agent {
		return t.UserData, nil
	}
	return l.agentUserData(t.UserData)
}

// ReadSecret returns the worker and the generation that an enrollment secret is
// for. Errors: ErrEnrollment.
func (l *Launches) ReadSecret(secret string) (id, generation string, err error) {
	text, ok := strings.CutPrefix(secret, enrollPrefix)
	i := strings.LastIndexByte(text, '_')
	if !ok || i < 0 || len(secret) > 256 || l.seal == nil {
		return "", "", ErrEnrollment
	}
	given, err := hex.DecodeString(text[i+1:])
	if err != nil || !hmac.Equal(given, l.seal.MAC("enroll:"+l.fleet+":"+text[:i])) {
		return "", "", ErrEnrollment
	}
	id, generation, _ = strings.Cut(text[:i], "_")
	return id, generation, nil
}

package activity

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"

	"lull/internal/core/instance"
)

// jupyter requests the kernels of a Jupyter server. The server is active if a
// kernel is working or has a client connected, such as a notebook.
func jupyter(ctx context.Context, p *instance.Probe) Reading {
	status, body, err := get(ctx, p, strings.TrimRight(p.URL, "/")+"/api/kernels", "token", maxJSON)
	switch {
	case err != nil:
		return failed(ctx, p, err)
	case status == http.StatusForbidden || status == http.StatusUnauthorized || status == http.StatusFound:
		return unknown("status %d: the token is missing or not accepted", status)
	case status != http.StatusOK:
		return unknown("status %d", status)
	}
	return kernels(body)
}

// kernels judges the list of kernels of a Jupyter server.
func kernels(body []byte) Reading {
	var list []struct {
		State       *string `json:"execution_state"`
		Connections *int    `json:"connections"`
	}
	if err := json.Unmarshal(body, &list); err != nil || list == nil {
		return unknown("the answer is not a list of kernels")
	}
	busy, connected := 0, 0
	for n, k := range list {
		if k.State == nil || k.Connections == nil || *k.Connections < 0 {
			return unknown("kernel %d has no execution_state or no connections", n)
		}
		switch *k.State {
		case "busy", "starting", "restarting", "autorestarting":
			busy++
		case "idle", "dead":
		default:
			return unknown("kernel %d has the unknown execution_state %q", n, firstLine(*k.State))
		}
		if *k.Connections > 0 {
			connected++
		}
	}
	r := judged(busy+connected > 0, "of %d kernels, %d are working and %d have clients (0 is quiet)", len(list), busy, connected)
	r.Value = float64(max(busy, connected))
	return r
}

// talk connects to a probe's address and returns the reading that ask takes from
// the connection. When ctx ends, the connection is closed and the reading is
// unknown.
func talk(ctx context.Context, p *instance.Probe, ask func(io.ReadWriter, *instance.Probe) (Reading, error)) Reading {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", p.Address)
	if err != nil {
		return failed(ctx, p, err)
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	r, err := ask(c, p)
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return unknown("the server closed the connection before the end of its answer")
	case err != nil:
		return failed(ctx, p, err)
	}
	return r
}

// maxStatus bounds the status of a Minecraft server, in bytes. It may contain an
// icon.
const maxStatus = 1 << 20

// minecraft asks for the status that clients show in their list of servers. Players
// on the server are active.
func minecraft(c io.ReadWriter, p *instance.Probe) (Reading, error) {
	host, port, err := net.SplitHostPort(p.Address)
	if err != nil {
		return Reading{}, err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return Reading{}, err
	}
	// The handshake: packet 0, any version of the protocol (-1 as 32 bits), the
	// server's address, and next state 1 (status). The request is an empty packet
	// 0.
	hello := []byte{0, 0xff, 0xff, 0xff, 0xff, 0x0f}
	hello = append(binary.AppendUvarint(hello, uint64(len(host))), host...)
	hello = append(binary.BigEndian.AppendUint16(hello, uint16(n)), 1)
	packet := append(binary.AppendUvarint(nil, uint64(len(hello))), hello...)
	if _, err := c.Write(append(packet, 1, 0)); err != nil {
		return Reading{}, err
	}
	status, err := readStatus(bufio.NewReader(c))
	if err != nil {
		return Reading{}, err
	}
	return players(status), nil
}

// readStatus reads the packet with a server's status, a JSON document.
func readStatus(in *bufio.Reader) ([]byte, error) {
	size, err := binary.ReadUvarint(in)
	if err == nil && size > maxStatus {
		err = fmt.Errorf("the answer has more than %d bytes", maxStatus)
	}
	if err != nil {
		return nil, err
	}
	packet := make([]byte, size)
	if _, err := io.ReadFull(in, packet); err != nil {
		return nil, err
	}
	rest := bytes.NewReader(packet)
	id, err := binary.ReadUvarint(rest)
	if err == nil && id == 0 {
		size, err = binary.ReadUvarint(rest)
	}
	if err != nil || id != 0 || size != uint64(rest.Len()) {
		return nil, errors.New("the answer is not the status of a Minecraft server")
	}
	return packet[len(packet)-rest.Len():], nil
}

// players judges the status of a Minecraft server.
func players(status []byte) Reading {
	var s struct {
		Players struct {
			Online *int `json:"online"`
		} `json:"players"`
	}
	switch err := json.Unmarshal(status, &s); {
	case err != nil:
		return unknown("the server's status is not valid JSON")
	case s.Players.Online == nil || *s.Players.Online < 0:
		return unknown("the server does not say how many players are online")
	}
	r := judged(*s.Players.Online > 0, "%d players are online (0 is quiet)", *s.Players.Online)
	r.Value = float64(*s.Players.Online)
	return r
}

// maxStats bounds the statistics of a beanstalkd, in bytes.
const maxStats = 64 << 10

// beanstalkd requests the statistics of all tubes or of one. Ready, reserved and
// delayed jobs are active; buried ones are not.
func beanstalkd(c io.ReadWriter, p *instance.Probe) (Reading, error) {
	command := "stats"
	if p.Field != "" {
		command = "stats-tube " + p.Field
	}
	if _, err := io.WriteString(c, command+"\r\n"); err != nil {
		return Reading{}, err
	}
	in := bufio.NewReader(io.LimitReader(c, maxStats))
	head, err := textproto.NewReader(in).ReadLine()
	if err != nil {
		return Reading{}, err
	}
	size, isOK := strings.CutPrefix(head, "OK ")
	n, err := strconv.ParseUint(size, 10, 16)
	if !isOK || err != nil {
		return unknown("the answer is %q", firstLine(head)), nil
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(in, body); err != nil {
		return Reading{}, err
	}
	return jobs(body), nil
}

// jobs judges the statistics of a beanstalkd server.
func jobs(stats []byte) Reading {
	counts := map[string]uint64{}
	for line := range strings.Lines(string(stats)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		if n, err := strconv.ParseUint(value, 10, 64); err == nil {
			counts[name] = n
		}
	}
	total := 0.0
	for _, kind := range []string{"ready", "reserved", "delayed"} {
		n, has := counts["current-jobs-"+kind]
		if !has {
			return unknown("the answer does not say how many jobs are %s", kind)
		}
		total += float64(n)
	}
	r := judged(total > 0, "%.0f jobs are ready, reserved or delayed (0 is quiet)", total)
	r.Value = total
	return r
}

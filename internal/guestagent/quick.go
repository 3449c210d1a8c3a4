package guestagent

import (
	"bytes"
	"encoding/base64"
	"strconv"

	"lull/internal/protocol/guest"
)

// quick answers a set_clock request if the line has exactly the form that a host
// writes. It returns false for any other line, which must then be decoded. In cold
// software emulation, decoding and encoding JSON takes tens of milliseconds while a
// client waits.
func (h *Harness) quick(line []byte) ([]byte, bool) {
	rest, ok := bytes.CutPrefix(line, []byte(`{"jsonrpc":"2.0","id":`))
	if !ok {
		return nil, false
	}
	id, rest, ok := bytes.Cut(rest, []byte(`,"method":"set_clock","params":{"unix_ns":`))
	if !ok {
		return nil, false
	}
	at, rest, ok := bytes.Cut(rest, []byte(`,"seed":"`))
	if !ok {
		return nil, false
	}
	text, ok := bytes.CutSuffix(rest, []byte(`"}}`))
	if !ok {
		return nil, false
	}
	if _, err := strconv.ParseUint(string(id), 10, 64); err != nil {
		return nil, false
	}
	var c guest.ClockCall
	var err error
	if c.UnixNano, err = strconv.ParseInt(string(at), 10, 64); err != nil {
		return nil, false
	}
	c.Seed = make([]byte, base64.StdEncoding.DecodedLen(len(text)))
	n, err := base64.StdEncoding.Decode(c.Seed, text)
	if err != nil {
		return nil, false
	}
	c.Seed = c.Seed[:n]
	hello := h.hello()
	if hello.Exit != nil {
		return nil, false
	}
	a, err := h.setClock(c)
	if err != nil {
		return nil, false
	}
	b := append([]byte(`{"jsonrpc":"2.0","id":`), id...)
	b = strconv.AppendInt(append(b, `,"result":{"behind_ns":`...), a.Behind, 10)
	b = strconv.AppendInt(append(b, `,"hello":{"version":`...), guest.Version, 10)
	b = strconv.AppendQuote(append(b, `,"boot":`...), hello.Boot)
	b = strconv.AppendBool(append(b, `,"running":`...), hello.Running)
	b = strconv.AppendBool(append(b, `,"busy":`...), hello.Busy)
	return append(b, `}}}`...), true
}

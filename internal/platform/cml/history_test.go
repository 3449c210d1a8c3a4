package cml

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"time"
)

const adminID = "00000000-0000-4000-a000-000000000000"

// historyStart is the time of the first event of every synthetic history.
var historyStart = time.Date(2025, 11, 19, 0, 0, 0, 0, time.UTC)

// The proportions of a measured history of 3,136 events: 30 lab events, 196 node
// events, 207 system_stats, 207 running_nodes, the rest automated user_activity
// and system information.
const (
	historyLen      = 3136
	historyRelevant = 226
)

// historyKinds lists the category of each event of one history, with the
// categories spread evenly.
var historyKinds = func() []string {
	shares := []struct {
		n    int
		name string
	}{
		{8, "start_lab"}, {8, "stop_lab"}, {4, "wipe_lab"}, {6, "import_lab"}, {4, "export_lab"},
		{60, "start_node"}, {50, "stop_node"}, {46, "queue_node"}, {40, "boot_node"},
		{207, "system_stats"}, {207, "running_nodes"},
		{56, "aaa_info"}, {56, "license_info"}, {56, "dmiinfo"}, {56, "cpuinfo"}, {56, "meminfo"},
		{56, "blkinfo"}, {56, "hypervisor"},
		{2104, userActivity},
	}
	kinds := make([]string, 0, historyLen)
	credit := make([]int, len(shares))
	for range historyLen {
		best := 0
		for k := range shares {
			credit[k] += shares[k].n
			if credit[k] > credit[best] {
				best = k
			}
		}
		credit[best] -= historyLen
		kinds = append(kinds, shares[best].name)
	}
	return kinds
}()

// appendEvent appends event number i of a history. Events are ten seconds apart.
func appendEvent(dst []byte, i int) []byte {
	kind := historyKinds[i%historyLen]
	at := historyStart.Add(time.Duration(i) * 10 * time.Second)
	dst = append(dst, `{"category": "`...)
	dst = append(dst, kind...)
	dst = append(dst, `", "timestamp": "`...)
	dst = at.AppendFormat(dst, "2006-01-02T15:04:05.000Z")
	dst = append(dst, `", "data": `...)
	switch kind {
	case userActivity:
		dst = fmt.Appendf(dst, `{"user_id": "%s", "method": "GET", "path": "/api/v0/system_stats", "status": 200}`, adminID)
	case "system_stats":
		dst = fmt.Appendf(dst, `{"computes": {"%08x": {"cpu": {"count": 48, "percent": %d.%d, "load": [1.25, 0.97, 0.5]}, `+
			`"memory": {"used": %d, "free": 151322902784, "total": 202422902784}, "disk": {"used": 3221225472, "free": 104857600, "total": 322122547200}, `+
			`"dominfo": {"total_nodes": 12, "running_nodes": 7, "allocated_cpus": 14, "allocated_memory": 15032385536}}}}`, i, i%100, i%10, i*4096)
	case "running_nodes":
		dst = fmt.Appendf(dst, `{"running_nodes": %d, "definitions": {"iosv": 3, "iosvl2": 2, "server": 2}}`, i%20)
	case "start_node", "stop_node", "queue_node", "boot_node":
		dst = fmt.Appendf(dst, `{"node_id": "%08x-27c1-4f5e-9d0e-000000000001", "lab_id": "f00d", "node_definition": "iosv", "label": "r\u00e9seau \"%d\""}`, i, i)
	default:
		dst = fmt.Appendf(dst, `{"id": "%08x", "vendor": "Intel(R) Xeon(R) Platinum 8259CL", "flags": ["vmx", "sse4_2", "avx512"], "ok": true, "note": null}`, i)
	}
	return append(dst, '}')
}

// historyReader yields a history of at least size bytes, generated as it is read.
type historyReader struct {
	size    int64
	made    int64
	i       int
	pending []byte
	closed  bool
	block   []byte
}

func newHistoryReader(size int64) *historyReader {
	return &historyReader{size: size, pending: []byte("[")}
}

func (h *historyReader) Read(p []byte) (int, error) {
	for len(h.pending) == 0 {
		if h.closed {
			return 0, io.EOF
		}
		h.block = h.block[:0]
		for range 256 {
			if h.i > 0 {
				h.block = append(h.block, ", "...)
			}
			h.block = appendEvent(h.block, h.i)
			h.i++
		}
		if h.made+int64(len(h.block)) >= h.size {
			h.block = append(h.block, ']')
			h.closed = true
		}
		h.pending = h.block
	}
	n := copy(p, h.pending)
	h.pending = h.pending[n:]
	h.made += int64(n)
	return n, nil
}

// history returns n events as one JSON array.
func history(n int) string {
	var b bytes.Buffer
	b.WriteByte('[')
	for i := range n {
		if i > 0 {
			b.WriteString(", ")
		}
		b.Write(appendEvent(nil, i))
	}
	b.WriteByte(']')
	return b.String()
}

func array(events ...string) string { return "[" + strings.Join(events, ",\n") + "]" }

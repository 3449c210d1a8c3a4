package fuse

import (
	"bytes"
	"encoding/binary"
	"syscall"

	"lull/internal/protocol/guest/files"
)

// FUSE operations (include/uapi/linux/fuse.h).
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opSetattr     = 4
	opReadlink    = 5
	opSymlink     = 6
	opMknod       = 8
	opMkdir       = 9
	opUnlink      = 10
	opRmdir       = 11
	opRename      = 12
	opLink        = 13
	opOpen        = 14
	opRead        = 15
	opWrite       = 16
	opStatfs      = 17
	opRelease     = 18
	opFsync       = 20
	opInit        = 26
	opOpendir     = 27
	opReaddir     = 28
	opReleasedir  = 29
	opFsyncdir    = 30
	opCreate      = 35
	opInterrupt   = 36
	opDestroy     = 38
	opBatchForget = 42
	opRename2     = 45
)

// Sizes and versions in the FUSE protocol.
const (
	inHead     = 40
	outHead    = 16
	major      = 7
	minor      = 31
	roomForAll = files.MaxData + 8<<10 // size of a buffer for any request
)

// Flags and values negotiated at initialization.
const (
	asyncRead        = 1 << 0
	bigWrites        = 1 << 5
	autoInval        = 1 << 12 // invalidate cached data when the host's file changes
	parallelDirs     = 1 << 18
	maxPages         = 1 << 22
	wanted           = asyncRead | bigWrites | autoInval | parallelDirs | maxPages
	inBackground     = 16
	validFor         = 1 // how long the kernel caches names and attributes, in seconds
	shownBlock       = 4096
	renameNoRepl     = 1
	notifyInvalInode = 2 // a notification: drop the cached data of a node
	setattrMode      = 1 << 0
	setattrUID       = 1 << 1
	setattrGID       = 1 << 2
	setattrSize      = 1 << 3
	setattrAtime     = 1 << 4
	setattrMtime     = 1 << 5
	setattrANow      = 1 << 7
	setattrMNow      = 1 << 8
	openAccMode      = 3
	direntHead       = 24
	headOfRead       = 40
	headOfWrite      = 40
	sizeOfSetattr    = 88
)

var ne = binary.NativeEndian

// request is a request of the kernel.
type request struct {
	op     uint32
	unique uint64
	node   uint64
	body   []byte
}

// parse parses a request. It returns false if the request is invalid.
func parse(b []byte) (q request, ok bool) {
	if len(b) < inHead {
		return q, false
	}
	return request{op: ne.Uint32(b[4:]), unique: ne.Uint64(b[8:]), node: ne.Uint64(b[16:]), body: b[inHead:]}, true
}

// need reports whether the body has at least n bytes.
func (q *request) need(n int) bool { return len(q.body) >= n }

func (q *request) u32(at int) uint32 { return ne.Uint32(q.body[at:]) }
func (q *request) u64(at int) uint64 { return ne.Uint64(q.body[at:]) }

// names returns the NUL-terminated strings from offset at on.
func (q *request) names(at int) []string {
	if len(q.body) < at {
		return nil
	}
	var out []string
	for b := q.body[at:]; ; {
		s, rest, ok := bytes.Cut(b, []byte{0})
		if !ok {
			return out
		}
		out = append(out, string(s))
		b = rest
	}
}

// owner is the owner of the workspace's files as seen in the guest.
type owner struct{ uid, gid uint32 }

func appendAttr(b []byte, a *files.Attr, o owner, removed bool) []byte {
	links := a.Links
	if removed && links > 0 {
		links--
	}
	for _, v := range []uint64{a.Ino, uint64(a.Size), uint64(a.Blocks), seconds(a.Atime), seconds(a.Mtime), seconds(a.Ctime)} {
		b = ne.AppendUint64(b, v)
	}
	for _, v := range []uint32{rest(a.Atime), rest(a.Mtime), rest(a.Ctime), a.Mode, links, o.uid, o.gid, 0, shownBlock, 0} {
		b = ne.AppendUint32(b, v)
	}
	return b
}

// seconds and rest split a time into seconds and nanoseconds. The latter are never
// negative.
func seconds(ns int64) uint64 { return uint64((ns - int64(rest(ns))) / 1e9) }

func rest(ns int64) uint32 { return uint32(((ns % 1e9) + 1e9) % 1e9) }

func appendEntry(b []byte, id uint64, a *files.Attr, o owner) []byte {
	for _, v := range []uint64{id, 0, validFor, attrValidFor(a), 0} { // the last one covers both nanosecond fields
		b = ne.AppendUint64(b, v)
	}
	return appendAttr(b, a, o, false)
}

func appendAttrOut(b []byte, a *files.Attr, o owner, removed bool) []byte {
	b = ne.AppendUint64(b, attrValidFor(a))
	b = ne.AppendUint64(b, 0)
	return appendAttr(b, a, o, removed)
}

// attrValidFor returns how long the kernel may cache attributes, in seconds. Each
// name of a file has a node of its own, so a change through one name does not
// update what is cached for the others. The attributes of a file with several names
// are therefore not cached.
func attrValidFor(a *files.Attr) uint64 {
	if a.Mode&syscall.S_IFMT != syscall.S_IFDIR && a.Links > 1 {
		return 0
	}
	return validFor
}

func appendOpen(b []byte, handle uint64) []byte {
	b = ne.AppendUint64(b, handle)
	return ne.AppendUint64(b, 0)
}

// appendDirent appends a directory entry and returns true, unless b would exceed
// room. next is the cursor after the entry.
func appendDirent(b []byte, e *files.Entry, next uint64, room int) ([]byte, bool) {
	size := (direntHead + len(e.Name) + 7) &^ 7
	if len(b)+size > room {
		return b, false
	}
	end := len(b) + size
	b = ne.AppendUint64(b, e.Ino)
	b = ne.AppendUint64(b, next)
	b = ne.AppendUint32(b, uint32(len(e.Name)))
	b = ne.AppendUint32(b, uint32(e.Type))
	b = append(b, e.Name...)
	return append(b, make([]byte, end-len(b))...), true
}

// hello answers the kernel's initialization request.
func hello(q *request) ([]byte, syscall.Errno) {
	if !q.need(16) || q.u32(0) != major || q.u32(4) < minor {
		return nil, syscall.EPROTO
	}
	b := make([]byte, 0, 64)
	for _, v := range []uint32{major, minor, min(q.u32(8), files.MaxData), wanted & q.u32(12)} {
		b = ne.AppendUint32(b, v)
	}
	b = ne.AppendUint16(b, inBackground)
	b = ne.AppendUint16(b, inBackground*3/4)
	b = ne.AppendUint32(b, files.MaxData)
	b = ne.AppendUint32(b, 1) // timestamp granularity in nanoseconds
	b = ne.AppendUint16(b, files.MaxData/shownBlock)
	return append(b, make([]byte, 64-len(b))...), 0
}

package fuse

import (
	"strings"
	"sync"
	"syscall"

	"lull/internal/protocol/guest/files"
)

// rootID is the node number of the workspace's root.
const rootID = 1

// node is a file that the guest's kernel knows by a number. It records the path
// under which the kernel found the file, because the host knows only paths.
type node struct {
	id      uint64
	parent  *node // nil for the root and for removed files
	name    string
	ino     uint64 // inode number on the host
	kind    uint32
	lookups uint64 // number of the kernel's lookups that it has not forgotten
	opens   int
	removed bool // removed while open: the file has a hidden name until it is closed
	kids    map[string]*node
}

// tree holds the nodes. order is locked for writing while a name changes, and for
// reading while a path is in use, so that a path stays valid until its request has
// been answered.
type tree struct {
	order sync.RWMutex

	mu    sync.Mutex
	root  *node
	nodes map[uint64]*node
	next  uint64
}

func newTree() *tree {
	root := &node{id: rootID, lookups: 1, kind: syscall.S_IFDIR, kids: map[string]*node{}}
	return &tree{root: root, nodes: map[uint64]*node{rootID: root}, next: rootID}
}

// where returns the path of a node and the inode number that the file must have.
func (t *tree) where(id uint64) (path string, ino uint64, errno syscall.Errno) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.nodes[id]
	if n == nil {
		return "", 0, syscall.ESTALE
	}
	path, errno = t.path(n)
	return path, n.ino, errno
}

// below returns the path of name in the directory with node number id.
func (t *tree) below(id uint64, name string) (string, syscall.Errno) {
	dir, _, errno := t.where(id)
	if errno != 0 {
		return "", errno
	}
	return join(dir, name)
}

func join(dir, name string) (string, syscall.Errno) {
	p := name
	if dir != "" {
		p = dir + "/" + name
	}
	if len(name) > files.MaxName || len(p) > files.MaxPath {
		return "", syscall.ENAMETOOLONG
	}
	return p, 0
}

func (t *tree) path(n *node) (string, syscall.Errno) {
	var names []string
	for ; n != t.root; n = n.parent {
		if n.parent == nil {
			return "", syscall.ESTALE
		}
		names = append(names, n.name)
	}
	p := ""
	for i := len(names) - 1; i >= 0; i-- {
		var errno syscall.Errno
		if p, errno = join(p, names[i]); errno != 0 {
			return "", errno
		}
	}
	return p, 0
}

// found returns the node number for a directory entry that a lookup has found, and
// counts the lookup.
func (t *tree) found(dir uint64, name string, a *files.Attr) (id uint64, errno syscall.Errno) {
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.nodes[dir]
	if d == nil {
		return 0, syscall.ESTALE
	}
	k := d.kids[name]
	if k != nil && (k.ino != a.Ino || k.kind != a.Mode&syscall.S_IFMT) {
		t.detach(k) // another file has replaced it
		k = nil
	}
	if k == nil {
		t.next++
		k = &node{id: t.next, ino: a.Ino, kind: a.Mode & syscall.S_IFMT}
		t.nodes[k.id] = k
		t.attach(k, d, name)
	}
	k.lookups++
	return k.id, 0
}

func (t *tree) attach(n, dir *node, name string) {
	if dir.kids == nil {
		dir.kids = map[string]*node{}
	}
	n.parent, n.name = dir, name
	dir.kids[name] = n
}

// detach removes a node from its directory.
func (t *tree) detach(n *node) {
	if n.parent == nil {
		return
	}
	dir := n.parent
	delete(dir.kids, n.name)
	n.parent = nil
	t.prune(dir)
}

// prune drops a node that the kernel does not reference and that has no children.
func (t *tree) prune(n *node) {
	if n.lookups > 0 || n.opens > 0 || len(n.kids) > 0 || n == t.root {
		return
	}
	delete(t.nodes, n.id)
	t.detach(n)
}

// forget takes back some of the kernel's references to a node.
func (t *tree) forget(id, times uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.nodes[id]
	if n == nil {
		return
	}
	n.lookups -= min(times, n.lookups)
	t.prune(n)
}

// kid returns the known node of a directory entry, or nil.
func (t *tree) kid(dir uint64, name string) *node {
	t.mu.Lock()
	defer t.mu.Unlock()
	if d := t.nodes[dir]; d != nil {
		return d.kids[name]
	}
	return nil
}

// unname detaches the node of a removed file.
func (t *tree) unname(n *node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n != nil {
		t.detach(n)
		t.prune(n)
	}
}

// move records a rename. A file that had the new name is detached.
func (t *tree) move(n *node, dir uint64, name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.nodes[dir]
	if n == nil || d == nil {
		return
	}
	if was := d.kids[name]; was != nil && was != n {
		t.detach(was)
		t.prune(was)
	}
	old := n.parent
	if old != nil {
		delete(old.kids, n.name)
	}
	t.attach(n, d, name)
	if old != nil {
		t.prune(old)
	}
}

// opened counts an open file.
func (t *tree) opened(id uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := t.nodes[id]; n != nil {
		n.opens++
	}
}

// closed counts a close. last reports whether it was the last, after which a
// removed file must be deleted.
func (t *tree) closed(id uint64) (n *node, last bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n = t.nodes[id]
	if n == nil || n.opens == 0 {
		return nil, false
	}
	n.opens--
	return n, n.opens == 0
}

// isOpen reports whether the guest has the file open.
func (t *tree) isOpen(n *node) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return n != nil && n.opens > 0 && n.kind == syscall.S_IFREG && !n.removed
}

// hidden records whether the file has a hidden name.
func (t *tree) hidden(n *node, on bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n.removed = on
}

func (t *tree) wasRemoved(id uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.nodes[id]
	return n != nil && n.removed
}

func isHidden(dir uint64, name string) bool {
	return dir == rootID && strings.HasPrefix(name, files.Hidden)
}

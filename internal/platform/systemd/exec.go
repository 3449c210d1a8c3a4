package systemd

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// Exec is how a manager executes the program of a service, and what it forbids it.
type Exec struct {
	Program string   // as configured, usually an absolute path
	Args    []string // from the program's own name on; variables are not expanded
	Flags   []string // of ExecStart=, as in ExecStartEx: ignore-failure, privileged, ...

	SearchPath         []string // of programs without a slash; empty for the manager's
	NoExecPaths        []string
	Calls              Filter // SystemCallFilter=
	Families           Filter // RestrictAddressFamilies=
	Root               string // RootDirectory= or RootImage=; empty for the machine's
	User               string
	DynamicUser        bool
	NoNewPrivs         bool
	Capabilities       uint64   // bounding set
	RuntimeDirectories []string // relative to /run
	PreservesRuntime   bool     // a stop does not remove them
}

// Filter is a list of names that are allowed, or of those that are not.
type Filter struct {
	Allows bool
	Names  []string
}

// Permits reports whether a name is allowed.
func (f Filter) Permits(name string) bool {
	for _, n := range f.Names {
		if n, _, _ = strings.Cut(n, ":"); n == name { // an error number may follow
			return f.Allows
		}
	}
	return !f.Allows
}

// ErrNoSearchPath means that a manager is too old for ExecSearchPath=.
var ErrNoSearchPath = errors.New("that needs systemd 250")

// Exec reads how the program of a service is executed. It must have exactly one
// ExecStart=.
func (m *Conn) Exec(ctx context.Context, name string) (e Exec, err error) {
	p, err := m.props(ctx, name, serviceFace)
	if err != nil {
		return e, err
	}
	if _, ok := p["ExecSearchPath"]; !ok {
		return e, ErrNoSearchPath
	}
	var errs []error
	var commands [][]any
	var image, preserve string
	take(p, "ExecStartEx", &commands, &errs)
	take(p, "ExecSearchPath", &e.SearchPath, &errs)
	take(p, "NoExecPaths", &e.NoExecPaths, &errs)
	take(p, "RootDirectory", &e.Root, &errs)
	take(p, "RootImage", &image, &errs)
	take(p, "User", &e.User, &errs)
	take(p, "DynamicUser", &e.DynamicUser, &errs)
	take(p, "NoNewPrivileges", &e.NoNewPrivs, &errs)
	take(p, "CapabilityBoundingSet", &e.Capabilities, &errs)
	take(p, "RuntimeDirectory", &e.RuntimeDirectories, &errs)
	take(p, "RuntimeDirectoryPreserve", &preserve, &errs)
	e.Calls = takeFilter(p, "SystemCallFilter", &errs)
	e.Families = takeFilter(p, "RestrictAddressFamilies", &errs)
	if e.PreservesRuntime = preserve == "yes"; e.Root == "" {
		e.Root = image
	}
	if err := errors.Join(errs...); err != nil {
		return e, err
	}
	if len(commands) != 1 {
		return e, fmt.Errorf("%s has %d commands to start, want one", name, len(commands))
	}
	c, ok := commands[0], len(commands[0]) > 2
	if ok {
		e.Program, ok = c[0].(string)
	}
	if ok {
		e.Args, ok = c[1].([]string)
	}
	if ok {
		e.Flags, ok = c[2].([]string)
	}
	if !ok || e.Program == "" || len(e.Args) == 0 {
		return e, errors.New("systemd does not report ExecStartEx as expected")
	}
	return e, nil
}

// takeFilter reads a property of a flag and names.
func takeFilter(p props, name string, errs *[]error) (f Filter) {
	var v []any
	take(p, name, &v, errs)
	if v == nil {
		return f
	}
	ok := len(v) == 2
	if ok {
		f.Allows, ok = v[0].(bool)
	}
	if ok {
		f.Names, ok = v[1].([]string)
	}
	if !ok {
		*errs = append(*errs, fmt.Errorf("systemd does not report %s as expected", name))
	}
	return f
}

// UnitPath returns the directories in which a manager searches for unit files.
func (m *Conn) UnitPath(ctx context.Context) (dirs []string, err error) {
	p := props{}
	if err := m.call(ctx, managerPath, properties+".GetAll", []any{&p}, managerFace); err != nil {
		return nil, err
	}
	var errs []error
	take(p, "UnitPath", &dirs, &errs)
	return dirs, errors.Join(errs...)
}

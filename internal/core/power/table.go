package power

import (
	"fmt"
	"strings"
)

// Cause is the kind of event that triggers a transition. The set is closed; APIs
// add details in a separate sentence.
type Cause string

// The causes. For instances, Idle, Wake and Ladder are lull's own decisions,
// as Controller is for workers. Observed and Exit report outside events.
const (
	Command    Cause = "command"    // requested by a user or API client
	Controller Cause = "controller" // decided by the controller, or the cloud rejected its call
	Observed   Cause = "observed"   // reported by the cloud
	Timeout    Cause = "timeout"    // a transitional state's deadline passed
	Idle       Cause = "idle"       // idle for its timeout
	Ladder     Cause = "ladder"     // asleep long enough for the next deeper state
	Wake       Cause = "wake"       // a connection, or data on an open connection
	Cancelled  Cause = "cancelled"  // the final check found a reason not to pause
	Done       Cause = "done"       // completed by the runtime
	Failure    Cause = "failure"    // the runtime reported an error
	Exit       Cause = "exit"       // the workload ended
	Restart    Cause = "restart"    // the restart policy, or a daemon that adopts the instance
)

// Kind distinguishes states that may last from those that must end.
type Kind string

// The kinds of states.
const (
	Resting      Kind = "resting"      // may last indefinitely
	Transitional Kind = "transitional" // has a deadline, an owner and a repair
	Final        Kind = "final"        // has no successor
)

// Deadline limits how long a transitional state may last.
type Deadline[S ~string] struct {
	Name   string // the setting or limit, by name
	Owner  string // who enforces the deadline
	Repair string // what the owner does when the deadline passes, for display
	To     []S    // states the repair may lead to, each a legal transition with cause Timeout
}

// State is one row of a table.
type State[S ~string] struct {
	Name     S
	Kind     Kind
	Doc      string // one sentence for display
	Deadline Deadline[S]
}

// Transition is one legal state change.
type Transition[S ~string] struct {
	From, To S
	Causes   []Cause
	Note     string // when it happens, in a few words
}

// Table lists the states and legal transitions of one kind of object. It must
// not be modified after construction and is then safe for concurrent use.
type Table[S ~string] struct {
	Name        string // kind of object, for errors: "instance", "worker"
	Initial     []S
	States      []State[S]
	Transitions []Transition[S]
}

// IllegalError is the error for a transition that the table does not contain.
type IllegalError struct {
	What, From, To string
	Legal          []string // states that may follow From
	Unknown        bool     // From or To is not in the table
}

func (e *IllegalError) Error() string {
	switch {
	case e.Unknown:
		return fmt.Sprintf("cannot take %s from %q to %q: no such state", e.What, e.From, e.To)
	case len(e.Legal) == 0:
		return fmt.Sprintf("cannot take %s from %s to %s: %s is final", e.What, e.From, e.To, e.From)
	}
	return fmt.Sprintf("cannot take %s from %s to %s: only %s may follow", e.What, e.From, e.To, strings.Join(e.Legal, ", "))
}

// Check returns nil if to may follow from, and an *IllegalError that lists the
// legal successors otherwise. A transition to the same state is illegal.
func (t *Table[S]) Check(from, to S) error {
	if _, ok := t.Find(from, to); ok {
		return nil
	}
	e := &IllegalError{What: t.Name, From: string(from), To: string(to), Unknown: !t.Has(from) || !t.Has(to)}
	for _, s := range t.Next(from) {
		e.Legal = append(e.Legal, string(s))
	}
	return e
}

// Find returns the transition from one state to another. ok is false if there is
// none.
func (t *Table[S]) Find(from, to S) (Transition[S], bool) {
	for _, tr := range t.Transitions {
		if tr.From == from && tr.To == to {
			return tr, true
		}
	}
	return Transition[S]{}, false
}

// Next returns the states that may follow s, in table order.
func (t *Table[S]) Next(from S) []S {
	var next []S
	for _, tr := range t.Transitions {
		if tr.From == from {
			next = append(next, tr.To)
		}
	}
	return next
}

// All returns the states in table order.
func (t *Table[S]) All() []S {
	all := make([]S, len(t.States))
	for i, s := range t.States {
		all[i] = s.Name
	}
	return all
}

// Has reports whether s is a state of the table.
func (t *Table[S]) Has(s S) bool {
	_, ok := t.State(s)
	return ok
}

// State returns the row of s. ok is false if s is not in the table.
func (t *Table[S]) State(s S) (State[S], bool) {
	for _, row := range t.States {
		if row.Name == s {
			return row, true
		}
	}
	return State[S]{}, false
}

// IsTransitional reports whether s is a transitional state.
func (t *Table[S]) IsTransitional(s S) bool {
	row, _ := t.State(s)
	return row.Kind == Transitional
}

func joinCauses(causes []Cause) string {
	names := make([]string, len(causes))
	for i, c := range causes {
		names[i] = string(c)
	}
	return strings.Join(names, ", ")
}

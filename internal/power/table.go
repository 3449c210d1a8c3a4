package power

import (
	"fmt"
	"strings"
)

// Cause says what may bring a transition about. The set is closed: an API that
// wants to say more has a sentence beside it.
type Cause string

// The causes. A worker's cause Controller and an instance's causes Idle, Wake
// and Ladder are lull's own decisions; Observed and Exit are news from outside.
const (
	Command    Cause = "command"    // a person or an API client asked
	Controller Cause = "controller" // the controller decided, or its own call was refused
	Observed   Cause = "observed"   // the cloud says so
	Timeout    Cause = "timeout"    // the deadline of a transitional state passed
	Idle       Cause = "idle"       // nobody used it for long enough
	Ladder     Cause = "ladder"     // it slept long enough for the next step down
	Wake       Cause = "wake"       // a connection, or data on an open one
	Cancelled  Cause = "cancelled"  // the second look found a reason not to
	Done       Cause = "done"       // the runtime has carried it out
	Failure    Cause = "failure"    // the runtime could not carry it out
	Exit       Cause = "exit"       // the workload ended
	Restart    Cause = "restart"    // the restart rule, or a daemon that takes over
)

// Kind tells where something may stay from where it only passes.
type Kind string

// The kinds of states.
const (
	Resting      Kind = "resting"      // may last for ever
	Transitional Kind = "transitional" // has a deadline, an owner and a repair
	Final        Kind = "final"        // nothing follows
)

// Deadline is what ends a transitional state that does not end by itself.
type Deadline[S ~string] struct {
	Name   string // of the setting or limit
	Owner  string // who watches it
	Repair string // what the owner does then, for people
	To     []S    // where the repair leads; legal transitions with cause Timeout
}

// State is one row of a table.
type State[S ~string] struct {
	Name     S
	Kind     Kind
	Doc      string // one sentence for people
	Deadline Deadline[S]
}

// Transition is one legal change.
type Transition[S ~string] struct {
	From, To S
	Causes   []Cause
	Note     string // when, in a few words
}

// Table is the one list of states and legal transitions of something. It is
// data: nobody changes it after it was made.
type Table[S ~string] struct {
	Name        string // of what, for errors: "instance", "worker"
	Initial     []S
	States      []State[S]
	Transitions []Transition[S]
}

// IllegalError is the answer to a transition that the table does not have.
type IllegalError struct {
	What, From, To string
	Legal          []string // what may follow From
	Unknown        bool     // From or To is no state at all
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

// Check returns nil when from may be followed by to, and an *IllegalError with
// what may follow otherwise. Staying is no transition.
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

// Find returns the transition between two states.
func (t *Table[S]) Find(from, to S) (Transition[S], bool) {
	for _, tr := range t.Transitions {
		if tr.From == from && tr.To == to {
			return tr, true
		}
	}
	return Transition[S]{}, false
}

// Next lists what may follow a state, in the order of the table.
func (t *Table[S]) Next(from S) []S {
	var next []S
	for _, tr := range t.Transitions {
		if tr.From == from {
			next = append(next, tr.To)
		}
	}
	return next
}

// All lists the states in the order of the table.
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

// State returns the row of a state.
func (t *Table[S]) State(s S) (State[S], bool) {
	for _, row := range t.States {
		if row.Name == s {
			return row, true
		}
	}
	return State[S]{}, false
}

// IsTransitional reports whether a state only passes.
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

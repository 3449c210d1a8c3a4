package httpx_test

import (
	"encoding/json"
	"testing"
	"time"

	"lull/internal/lib/httpx"
)

type leaf struct {
	Names []string `json:"names"`
	Notes []string `json:"notes,omitempty"`
}

type tree struct {
	leaf
	At     time.Time       `json:"at"`
	Raw    json.RawMessage `json:"raw"`
	Bytes  []byte          `json:"bytes"`
	Kids   []*tree         `json:"kids"`
	ByName map[string]leaf `json:"by_name"`
	Any    any             `json:"any"`
	Pair   [2]leaf         `json:"pair"`
	Zero   []string        `json:"zero,omitzero"`
	hidden []string
}

// TestLists checks that every nil list that would be written as null is replaced,
// at any depth, and that the given value is not modified.
func TestLists(t *testing.T) {
	in := tree{Kids: []*tree{{}, nil}, ByName: map[string]leaf{"a": {}}, Any: []leaf{{Names: []string{"x"}}, {}}}
	got, err := json.Marshal(httpx.Lists(in))
	if err != nil {
		t.Fatal(err)
	}
	const empty = `"at":"0001-01-01T00:00:00Z","raw":null,"bytes":null`
	const pair = `"pair":[{"names":[]},{"names":[]}]`
	want := `{"names":[],` + empty + `,"kids":[{"names":[],` + empty + `,"kids":[],"by_name":{},"any":null,` + pair + `},null],` +
		`"by_name":{"a":{"names":[]}},"any":[{"names":["x"]},{"names":[]}],` + pair + `}`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if in.Kids[0].Kids != nil || in.ByName["a"].Names != nil || in.Any.([]leaf)[1].Names != nil || in.Names != nil || in.hidden != nil {
		t.Error("the value that was given has changed")
	}
	full := &leaf{Names: []string{"a"}, Notes: []string{}}
	if httpx.Lists(full) != any(full) || httpx.Lists(nil) != nil {
		t.Error("a value without nil lists was copied")
	}
}

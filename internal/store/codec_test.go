package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

type record struct {
	Name  string `json:"name,omitempty"`
	Count int    `json:"count,omitempty"`
}

// codec is at format 3: 1 had "title", 2 had the count as text.
var codec = Codec[record]{
	Version: 3, MaxBytes: 200,
	Migrate: map[int]func(json.RawMessage) (json.RawMessage, error){
		1: func(old json.RawMessage) (json.RawMessage, error) {
			return json.RawMessage(strings.Replace(string(old), `"title"`, `"name"`, 1)), nil
		},
		2: func(old json.RawMessage) (json.RawMessage, error) {
			var r struct {
				Name  string `json:"name"`
				Count string `json:"count"`
			}
			if err := json.Unmarshal(old, &r); err != nil {
				return nil, err
			}
			var n int
			if _, err := fmt.Sscan(r.Count, &n); err != nil {
				return nil, err
			}
			return json.Marshal(record{Name: r.Name, Count: n})
		},
	},
}

func TestCodecDecode(t *testing.T) {
	full := record{Name: "a", Count: 7}
	for _, c := range []struct {
		data string
		want record
		err  error
		text string
	}{
		{`{"v":3,"name":"a","count":7}`, full, nil, ""},
		{`{"w":"AAAAAAAAAAAAAAAAAAAAAAAAAA","v":3,"name":"a","count":7}`, full, nil, ""},
		{`{ "name": "a", "w": "x", "count": 7, "v": 3 }`, full, nil, ""},
		{`{"v":3}`, record{}, nil, ""},
		{`{"v":2,"name":"a","count":"7"}`, full, nil, ""},
		{`{"v":1,"title":"a","count":"7"}`, full, nil, ""},
		{`{"v":4,"name":"a"}`, record{}, ErrNewer, "format 4, this version reads up to 3"},
		{`{"v":2,"name":"a","count":"x"}`, record{}, ErrInvalid, "from format 2"},
		{`{"v":0}`, record{}, ErrInvalid, `"v"`},
		{`{"v":03}`, record{}, ErrInvalid, `"v"`},
		{`{"v":-1}`, record{}, ErrInvalid, `"v"`},
		{`{"v":"3"}`, record{}, ErrInvalid, `"v"`},
		{`{"v":99999999999}`, record{}, ErrNewer, "99999999999"},
		{`{"v":99999999999999999999}`, record{}, ErrInvalid, `"v"`},
		{`{"name":"a"}`, record{}, ErrInvalid, `"v"`},
		{`{"v":3,"nmae":"a"}`, record{}, ErrInvalid, "nmae"},
		{`{"v":3,"name":1}`, record{}, ErrInvalid, "name"},
		{`{"v":3,"name":"a"}{}`, record{}, ErrInvalid, "after"},
		{`{"v":3,`, record{}, ErrInvalid, ""},
		{`{"v":3,}`, record{}, ErrInvalid, ""},
		{`{"w":"AAAAAAAAAAAAAAAAAAAAAAAAAA""v":3}`, record{}, ErrInvalid, ""},
		{``, record{}, ErrInvalid, ""},
		{`[]`, record{}, ErrInvalid, ""},
		{`null`, record{}, ErrInvalid, ""},
		{`{"v":3,"name":"` + strings.Repeat("x", 200) + `"}`, record{}, ErrTooLarge, "limit is 200"},
	} {
		got, err := codec.Decode("workers/1", []byte(c.data))
		if !errors.Is(err, c.err) || got != c.want {
			t.Errorf("%s: %+v, %v, want %+v, %v", c.data, got, err, c.want, c.err)
		}
		if err != nil && (!strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), `"workers/1"`)) {
			t.Errorf("%s: error %q lacks %q or the key", c.data, err, c.text)
		}
	}
	gap := Codec[record]{Version: 3}
	if _, err := gap.Decode("k", []byte(`{"v":2}`)); !errors.Is(err, ErrInvalid) {
		t.Errorf("no migration: %v", err)
	}
}

func TestCodecEncode(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		in := record{Name: rapid.StringN(0, 20, 20).Draw(rt, "name"), Count: rapid.Int().Draw(rt, "count")}
		data, err := codec.Encode("k", in)
		if err != nil {
			rt.Fatal(err)
		}
		_, marked, ok := addWriteID(data)
		if !ok {
			rt.Fatalf("%s cannot carry an id", data)
		}
		want := record{}
		plain, err := json.Marshal(in)
		if err == nil {
			err = json.Unmarshal(plain, &want)
		}
		if err != nil {
			rt.Fatal(err)
		}
		for _, d := range [][]byte{data, marked} {
			if out, err := codec.Decode("k", d); err != nil || out != want {
				rt.Fatalf("%s: %+v, %v, want %+v", d, out, err, want)
			}
		}
	})
	if _, err := codec.Encode("k", record{Name: strings.Repeat("x", 200)}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("large record: %v", err)
	}
	if _, err := (Codec[int]{Version: 1}).Encode("k", 1); !errors.Is(err, ErrInvalid) {
		t.Errorf("a number as a record: %v", err)
	}
}

func TestWriteID(t *testing.T) {
	for data, want := range map[string]string{
		`{}`: `{}`, `{ }`: `{}`, "{}\n": `{}`, `{"a":1}`: `{"a":1}`, " {\n\"a\":1}": `{"a":1}`,
		`{"w":"AAAAAAAAAAAAAAAAAAAAAAAAAA"}`:       `{}`,
		`{"w":"AAAAAAAAAAAAAAAAAAAAAAAAAA","a":1}`: `{"a":1}`,
		`{"w":"short","a":1}`:                      `{"w":"short","a":1}`,
	} {
		id, marked, ok := addWriteID([]byte(data))
		if !ok || !json.Valid(marked) || writeID(marked) != id || len(id) != idLength {
			t.Errorf("%s: marked %s with %q", data, marked, id)
		}
		if diff := cmp.Diff(want, string(StripWriteID(marked))); diff != "" {
			t.Errorf("%s: stripped (-want +got):\n%s", data, diff)
		}
	}
	for _, data := range []string{"", " ", "[]", "1", "null", `"{"`, "{"} {
		if _, marked, ok := addWriteID([]byte(data)); ok {
			t.Errorf("%q was marked: %s", data, marked)
		}
	}
}

// FuzzCodec checks that a decoded value can be encoded and decoded again, and that
// adding and removing a write ID does not change it.
func FuzzCodec(f *testing.F) {
	for _, s := range []string{
		`{"v":3,"name":"a","count":7}`, `{"v":1,"title":"a","count":"7"}`, `{"w":"AAAAAAAAAAAAAAAAAAAAAAAAAA","v":3}`,
		`{"v":4}`, `{"v":3,"v":2}`, `{"w":"AAAAAAAAAAAAAAAAAAAAAAAAAA"`, `{"v":`, ``,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		rec, err := codec.Decode("k", data)
		if err != nil {
			return
		}
		again, err := codec.Encode("k", rec)
		if errors.Is(err, ErrTooLarge) {
			return // escapes can make the encoded value longer
		}
		if err != nil {
			t.Fatal(err)
		}
		if got, err := codec.Decode("k", again); err != nil || got != rec {
			t.Fatalf("%q became %+v, %v, was %+v", data, got, err, rec)
		}
		if !json.Valid(StripWriteID(data)) {
			t.Fatalf("%q without its id is no JSON", data)
		}
	})
}

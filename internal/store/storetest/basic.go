package storetest

import (
	"fmt"
	"strings"
	"testing"

	"lull/internal/store"
)

func testRange(t *testing.T, h Harness) {
	for _, name := range []string{"a", "a/1", "a/2", "b", "c"} {
		put(t, h, name, "1")
	}
	put(t, h, "a/1", "2")
	commit(t, h, store.Txn{Then: []store.Op{store.Delete(h.key("b"))}})
	for _, c := range []struct {
		what string
		q    store.Query
		want string
		more bool
	}{
		{"prefix", store.Query{Keys: h.all()}, "a=1/1 a/1=2/2 a/2=1/1 c=1/1", false},
		{"inner prefix", store.Query{Keys: store.Prefix(h.key("a/"))}, "a/1=2/2 a/2=1/1", false},
		{"key", store.Query{Keys: store.Key(h.key("a"))}, "a=1/1", false},
		{"deleted key", store.Query{Keys: store.Key(h.key("b"))}, "", false},
		{"key after", store.Query{Keys: store.Key(h.key("a")), After: h.key("a")}, "", false},
		{"limit", store.Query{Keys: h.all(), Limit: 2}, "a=1/1 a/1=2/2", true},
		{"exact limit", store.Query{Keys: h.all(), Limit: 4}, "a=1/1 a/1=2/2 a/2=1/1 c=1/1", false},
		{"after", store.Query{Keys: h.all(), After: h.key("a/1")}, "a/2=1/1 c=1/1", false},
		{"after a gap", store.Query{Keys: h.all(), After: h.key("a/10")}, "a/2=1/1 c=1/1", false},
		{"after all", store.Query{Keys: h.all(), After: h.key("z")}, "", false},
		{"before all", store.Query{Keys: store.Prefix(h.key("c")), After: h.key("a")}, "c=1/1", false},
		{"keys only", store.Query{Keys: h.all(), KeysOnly: true, Limit: 1}, "a=/1", true},
	} {
		page, err := h.Store.Range(t.Context(), c.q)
		if err != nil {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		if got := show(h, page.Values); got != c.want || page.More != c.more {
			t.Errorf("%s: %q more=%v, want %q more=%v", c.what, got, page.More, c.want, c.more)
		}
	}
}

// testPages lists in small pages while keys before, in and after the pages change. It
// checks that the listing is the state at its first page.
func testPages(t *testing.T, h Harness) {
	var want []string
	for i := range 30 {
		name := fmt.Sprintf("k/%02d", i)
		put(t, h, name, "x")
		want = append(want, h.key(name))
	}
	q := store.Query{Keys: store.Prefix(h.key("k/")), Limit: 4}
	var got []string
	for i := 0; ; i++ {
		page, err := h.Store.Range(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range page.Values {
			got = append(got, v.Key)
			if string(v.Data) != "x" {
				t.Errorf("%s was read as written after the first page: %s", v.Key, v.Data)
			}
		}
		if !page.More {
			break
		}
		q.Revision, q.After = page.Revision, page.Values[len(page.Values)-1].Key
		put(t, h, fmt.Sprintf("k/%02d+", i*4), "new")
		put(t, h, fmt.Sprintf("k/%02d", 29-i), "late")
		commit(t, h, store.Txn{Then: []store.Op{store.Delete(h.key(fmt.Sprintf("k/%02d", 20-i)))}})
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("pages have\n%v, want\n%v", got, want)
	}
}

func testConditions(t *testing.T, h Harness) {
	l := grant(t, h.Store, 60e9)
	defer end(t, l)
	first := commit(t, h, store.Txn{Then: []store.Op{store.PutLeased(h.key("leased"), []byte("1"), l.ID())}}).Revision
	second := put(t, h, "plain", "1")
	third := put(t, h, "plain", "2")
	plain, leased, none := h.key("plain"), h.key("leased"), h.key("none")
	for i, c := range []struct {
		cond store.Cond
		want bool
	}{
		{store.Unchanged(store.Value{Key: plain, ModRevision: third}), true},
		{store.Unchanged(store.Value{Key: plain, ModRevision: second}), false},
		{store.Unchanged(store.Value{Key: plain}), false},
		{store.Unchanged(store.Value{Key: none}), true},
		{store.Absent(plain), false},
		{store.Absent(none), true},
		{store.CreatedAt(plain, second), true},
		{store.CreatedAt(plain, third), false},
		{store.CreatedAt(none, second), false},
		{store.CreatedAt(leased, first), true},
	} {
		for _, others := range [][]store.Cond{nil, {store.CreatedAt(plain, second)}, {store.CreatedAt(none, second)}} {
			marker := h.key(fmt.Sprintf("marker%d", i))
			res := commit(t, h, store.Txn{
				If:   append([]store.Cond{c.cond}, others...),
				Then: []store.Op{store.Put(marker, []byte("x"))},
				Read: []string{marker},
			})
			want := c.want && (others == nil || others[0].Key == plain)
			if res.Succeeded != want || res.Read[0].Exists() != want {
				t.Errorf("%+v with %v: succeeded %v, marker %v, want %v", c.cond, others, res.Succeeded, res.Read[0].Exists(), want)
			}
			commit(t, h, store.Txn{Then: []store.Op{store.Delete(marker)}})
		}
	}
}

func testCommit(t *testing.T, h Harness) {
	a, b := h.key("a"), h.key("b")
	res := commit(t, h, store.Txn{Then: []store.Op{store.Put(a, []byte("1")), store.Put(b, []byte("1"))}, Read: []string{b, a, h.key("c")}})
	for i, key := range []string{b, a} {
		if v := res.Read[i]; v.Key != key || v.ModRevision != res.Revision || v.CreateRevision != res.Revision || v.Version != 1 {
			t.Errorf("read %d after the puts: %+v, want %s at %d", i, v, key, res.Revision)
		}
	}
	if v := res.Read[2]; v.Exists() || v.Key != h.key("c") {
		t.Errorf("read of an absent key: %+v", v)
	}
	again := commit(t, h, store.Txn{Then: []store.Op{store.Put(a, []byte("1")), store.Delete(b)}, Read: []string{a, b}})
	if v := again.Read[0]; v.Version != 2 || v.CreateRevision != res.Revision || v.ModRevision != again.Revision {
		t.Errorf("same data put again: %+v", v)
	}
	if again.Revision <= res.Revision || again.Read[1].Exists() {
		t.Errorf("second transaction: %+v after %d", again, res.Revision)
	}
	nothing := commit(t, h, store.Txn{Then: []store.Op{store.Delete(b)}})
	refused := commit(t, h, store.Txn{If: []store.Cond{store.Absent(a)}, Then: []store.Op{store.Put(b, nil)}, Read: []string{b}})
	reads := commit(t, h, store.Txn{Read: []string{a}})
	if nothing.Revision < again.Revision || refused.Succeeded || refused.Read[0].Exists() || !reads.Succeeded {
		t.Errorf("no-op %+v, refused %+v, reads %+v", nothing, refused, reads)
	}
	if got := commit(t, h, store.Txn{Then: []store.Op{store.Put(b, nil)}, Read: []string{b}}); got.Read[0].Version != 1 || !got.Read[0].Exists() {
		t.Errorf("empty data after a delete: %+v", got.Read[0])
	}
}

func testLimits(t *testing.T, h Harness) {
	var most store.Txn
	for i := range store.MaxOps {
		key := h.key(fmt.Sprintf("many/%03d", i))
		most.If = append(most.If, store.Absent(key))
		most.Then = append(most.Then, store.Put(key, []byte("x")))
	}
	if res := commit(t, h, most); !res.Succeeded {
		t.Errorf("%d operations were refused", store.MaxOps)
	}
	more := most
	more.Then = append(more.Then[:len(more.Then):len(more.Then)], store.Put(h.key("over"), nil))
	_, err := h.Store.Commit(t.Context(), more)
	wantKind(t, "one operation too many", err, store.ErrTooLarge)
	more = store.Txn{If: append(most.If[:store.MaxOps:store.MaxOps], store.Absent(h.key("over")))}
	_, err = h.Store.Commit(t.Context(), more)
	wantKind(t, "one condition too many", err, store.ErrTooLarge)

	big := h.key("big")
	data := []byte(strings.Repeat("x", store.MaxTxnBytes-len(big)))
	commit(t, h, store.Txn{Then: []store.Op{store.Put(big, data)}})
	if v := get(t, h, "big"); len(v.Data) != len(data) {
		t.Errorf("largest data came back with %d bytes, want %d", len(v.Data), len(data))
	}
	_, err = h.Store.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put(big, append(data, 'x'))}})
	wantKind(t, "one byte too many", err, store.ErrTooLarge)
	if v := get(t, h, "big"); v.Version != 1 {
		t.Errorf("refused put changed the key: version %d", v.Version)
	}
}

func testInvalid(t *testing.T, h Harness) {
	a := h.key("a")
	for what, txn := range map[string]store.Txn{
		"two puts":       {Then: []store.Op{store.Put(a, nil), store.Put(a, nil)}},
		"put and delete": {Then: []store.Op{store.Put(a, nil), store.Delete(a)}},
		"empty key":      {Then: []store.Op{store.Put("", nil)}},
		"empty cond":     {If: []store.Cond{store.Absent("")}},
		"not text":       {Then: []store.Op{store.Put(h.key("\xff"), nil)}},
	} {
		_, err := h.Store.Commit(t.Context(), txn)
		wantKind(t, what, err, store.ErrInvalid)
	}
	_, err := h.Store.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put(h.key(strings.Repeat("k", store.MaxKeyBytes)), nil)}})
	wantKind(t, "long key", err, store.ErrTooLarge)
	_, err = h.Store.Grant(t.Context(), 1500e6)
	wantKind(t, "lease of 1.5 s", err, store.ErrInvalid)
	_, err = h.Store.Range(t.Context(), store.Query{Keys: h.all(), Limit: -1})
	wantKind(t, "negative limit", err, store.ErrInvalid)
	if page, err := h.Store.Range(t.Context(), store.Query{Keys: h.all()}); err != nil || len(page.Values) > 0 {
		t.Errorf("after invalid calls: %v %v", page, err)
	}
}

func testOldRevisions(t *testing.T, h Harness) {
	r1 := put(t, h, "a", "1")
	r2 := put(t, h, "a", "2")
	r3 := commit(t, h, store.Txn{Then: []store.Op{store.Delete(h.key("a")), store.Put(h.key("b"), []byte("1"))}}).Revision
	r4 := put(t, h, "a", "4")
	at := func(r int64) (string, error) {
		page, err := h.Store.Range(t.Context(), store.Query{Keys: h.all(), Revision: r})
		return show(h, page.Values), err
	}
	want := map[int64]string{r1: "a=1/1", r2: "a=2/2", r3: "b=1/1", r4: "a=4/1 b=1/1"}
	for r, state := range want {
		if got, err := at(r); got != state || err != nil {
			t.Errorf("at %d: %q, %v, want %q", r, got, err, state)
		}
	}
	if _, err := at(r4 + 1000); err == nil {
		t.Error("a revision of the future was read")
	} else {
		wantKind(t, "future", err, store.ErrInvalid)
	}
	if err := h.Compact(t.Context(), r3); err != nil {
		t.Fatal(err)
	}
	for _, r := range []int64{r1, r2} {
		_, err := at(r)
		wantKind(t, "compacted revision", err, store.ErrCompacted)
	}
	for _, r := range []int64{r3, r4} {
		if got, err := at(r); got != want[r] || err != nil {
			t.Errorf("at %d after compaction: %q, %v, want %q", r, got, err, want[r])
		}
	}
}

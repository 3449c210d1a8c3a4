package audit_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/lib/errtest"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// TestAuditByWhom checks queries for the entries of a user, of a kind of actor and of
// both, oldest first, newest first and as a table.
func TestAuditByWhom(t *testing.T) {
	c := mem.New(mem.Options{}).Client()
	defer c.Close()
	f, err := fleet.New(fleet.Options{Store: c, ID: "f1"})
	if err != nil {
		t.Fatal(err)
	}
	begun := time.Now().Add(-time.Hour)
	by := []audit.Actor{{Name: "Alice Adams", Kind: audit.KindUser}, audit.ByController, {Name: "bob", Kind: audit.KindUser}, {Name: "alice-laptop", Kind: audit.KindAgent}}
	for i := range 12 {
		ops, err := audit.Ops(audit.Entry{At: begun.Add(time.Duration(i) * time.Second), Action: "snoozed", By: by[i%len(by)], WorkerID: "w", WorkerName: "=lab", Detail: fmt.Sprint(i)})
		if err == nil {
			_, err = c.Commit(t.Context(), store.Txn{Then: ops})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, x := range []struct {
		q    audit.Query
		want string
	}{
		{audit.Query{}, "0 1 2 3 4 5 6 7 8 9 10 11"},
		{audit.Query{By: "ALICE"}, "0 3 4 7 8 11"},
		{audit.Query{By: "alice", Kind: audit.KindUser}, "0 4 8"},
		{audit.Query{Kind: audit.KindController, WorkerID: "w"}, "1 5 9"},
		{audit.Query{By: "bob", Action: "often"}, ""},
		{audit.Query{By: "carol"}, ""},
	} {
		for name, read := range map[string]func() (audit.Page, error){
			"oldest first": func() (audit.Page, error) { return f.Audit(t.Context(), x.q) },
			"newest first": func() (audit.Page, error) { return f.NewestAudit(t.Context(), x.q) },
		} {
			page, err := read()
			errtest.None(t, err)
			var got []string
			for _, e := range page.Entries {
				got = append(got, e.Detail)
			}
			if name == "newest first" {
				slices.Reverse(got)
			}
			if strings.Join(got, " ") != x.want || page.Next != "" {
				t.Errorf("%+v, %s: %v and then %q, want %s", x.q, name, got, page.Next, x.want)
			}
		}
	}
	var table strings.Builder
	errtest.None(t, f.ExportAuditCSV(t.Context(), &table, audit.Query{By: "bob"}))
	lines := strings.Split(strings.TrimSpace(table.String()), "\n")
	if len(lines) != 4 || lines[0] != "at,id,action,worker,worker_id,aws_region,by,by_kind,from,to,reason,detail" || !strings.HasSuffix(lines[3], ",snoozed,'=lab,w,,bob,person,,,,10") {
		t.Errorf("the table is\n%s", table.String())
	}
}

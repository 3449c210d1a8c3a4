package savings_test

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/core/savings"
	"lull/internal/lib/errtest"
)

func TestPublished(t *testing.T) {
	p, err := savings.Published()
	errtest.None(t, err)
	if v := p.Hour("us-east-1", "m5.large"); v == nil || *v != 0.096 {
		t.Errorf("m5.large: %v", v)
	}
	if p.Hour("us-east-1", "z9.huge") != nil || p.Hour("mars-1", "m5.large") != nil || p.StorageHour("us-east-1", nil) != nil {
		t.Error("a price was made up")
	}
}

func TestGroup(t *testing.T) {
	p, err := savings.Published()
	errtest.None(t, err)
	uses := []savings.Use{
		{Worker: "a", Region: "us-east-1", InstanceType: "m5.large", Volumes: []savings.Volume{{Type: "gp3", GB: 33}, {Type: "gp3", GB: 40}}, Avoided: 100 * time.Hour, Running: time.Hour},
		{Worker: "b", Region: "us-east-1", InstanceType: "z9.huge", Volumes: []savings.Volume{{Type: "gp3", GB: 33}, {Type: "gp3", GB: 40}}, Avoided: 10 * time.Hour},
		{Worker: "c", Region: "us-east-1", InstanceType: "m5.large", Avoided: 5 * time.Hour, Other: 2 * time.Hour, Volumes: []savings.Volume{{Type: "gp3", GB: 8}, {Type: "of-tomorrow", GB: 8}}},
	}
	groups, total := p.Group(uses, func(u savings.Use) (string, string) { return u.Worker, "" })
	close := func(what string, got *float64, want float64) {
		t.Helper()
		if got == nil || math.Abs(*got-want) > 1e-9 {
			t.Errorf("%s: %v, want %g", what, got, want)
		}
	}
	close("compute of a", groups[0].ComputeSaved, 9.6)
	close("storage of a", groups[0].StoragePaid, 0.8)
	close("saved by a", groups[0].Saved, 8.8)
	if groups[1].ComputeSaved != nil || groups[1].Saved != nil || groups[1].UnpricedHours != 10 {
		t.Errorf("without a price: %+v", groups[1])
	}
	if groups[2].Saved != nil || groups[2].UnknownStorageHours != 5 || groups[2].OtherHours != 2 {
		t.Errorf("without a size: %+v", groups[2])
	}
	close("saved in all", total.Saved, 8.8)
	if !total.Partial() || groups[0].Partial() {
		t.Errorf("what is not known of all: %t, of a: %t", total.Partial(), groups[0].Partial())
	}
	if total.AvoidedHours != 115 || total.Workers != 3 {
		t.Errorf("total: %+v", total)
	}
}

// TestMissing checks that each price missing from the table is listed once, with
// its workers and hours, and that known prices and unreported types are not
// listed.
func TestMissing(t *testing.T) {
	p, err := savings.Published()
	errtest.None(t, err)
	gp3 := []savings.Volume{{Type: "gp3", GB: 33}, {Type: "gp3", GB: 40}}
	got := p.Missing([]savings.Use{
		{Worker: "a", Region: "mars-1", InstanceType: "m5.large", Volumes: gp3, Avoided: 3 * time.Hour},
		{Worker: "a", Region: "mars-1", InstanceType: "m5.large", Volumes: gp3, Avoided: time.Hour, Part: true},
		{Worker: "b", Region: "us-east-1", InstanceType: "z9.huge", Volumes: gp3, Avoided: 10 * time.Hour},
		{Worker: "c", Region: "us-east-1", InstanceType: "z9.huge"},
		{Worker: "d", Region: "us-east-1", InstanceType: "m5.large", Volumes: gp3, Avoided: time.Hour},
		{Worker: "e", Region: "us-east-1", Avoided: time.Hour},
	})
	want := []savings.MissingPrice{
		{Kind: "instance", Region: "us-east-1", Name: "z9.huge", Workers: 2, Hours: 10},
		{Kind: "instance", Region: "mars-1", Name: "m5.large", Workers: 1, Hours: 4},
		{Kind: "storage", Region: "mars-1", Name: "gp3", Workers: 1, Hours: 4},
	}
	if !slices.Equal(got, want) {
		t.Errorf("missing %+v, want %+v", got, want)
	}
	if none := p.Missing(nil); none == nil || len(none) != 0 {
		t.Errorf("missing for no uses: %#v", none)
	}
}

const header = "kind,region,name,usd,as_of\n"

func TestReadRefuses(t *testing.T) {
	for in, want := range map[string]string{"": "empty", header: "empty", "a,b,c,d,e\n": "line 1", header + "instance,r,n,free,2026-01-01\n": "line 2",
		header + "instance,r,n,1,soon\n": "line 2", header + "car,r,n,1,2026-01-01\n": "line 2", header + "instance,r,n,1\n": "line 2",
		header + "instance,r,n,1,2026-01-01\ninstance,r,n,2,2026-01-01\n": "line 3", header + "instance,r,n,NaN,2026-01-01\n": "line 2"} {
		if _, err := savings.Read(strings.NewReader(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", in, err, want)
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add(header + "instance,us-east-1,m5.large,0.096,2026-01-01\n")
	f.Add("#\n" + header + "\"")
	f.Fuzz(func(t *testing.T, in string) {
		p, err := savings.Read(strings.NewReader(in))
		if (err == nil) != (len(p) > 0) {
			t.Errorf("%d prices and %v", len(p), err)
		}
	})
}

package scaletest

import (
	"flag"
	"testing"
)

func TestCounts(t *testing.T) {
	t.Setenv("LULL_DRAWS", "")
	if n := N(t, 7); n != 7 {
		t.Errorf("N(7) = %d", n)
	}
	t.Setenv("LULL_DRAWS", "0.01")
	if n := N(t, 7); n != 1 {
		t.Errorf("N(7) at a hundredth = %d", n)
	}
	t.Setenv("LULL_DRAWS", "20")
	if n := Count(t, "LULL_SCALETEST", 7); n != 140 {
		t.Errorf("Count(7) at 20 = %d", n)
	}
	t.Setenv("LULL_SCALETEST", "3")
	if n := Count(t, "LULL_SCALETEST", 7); n != 3 {
		t.Errorf("Count() with a variable of its own = %d", n)
	}
	for _, bad := range []string{"0", "-1", "NaN", "Inf", "many", "1e9"} {
		t.Setenv("LULL_DRAWS", bad)
		if n, err := scaled(1); err == nil {
			t.Errorf("LULL_DRAWS=%s gives %d", bad, n)
		}
	}
}

func TestRapid(t *testing.T) {
	checks := flag.Lookup("rapid.checks").Value
	before := checks.String()
	t.Cleanup(func() { _ = checks.Set(before) })
	t.Setenv("LULL_DRAWS", "0.5")
	Rapid(300)
	if got := checks.String(); got != "150" {
		t.Errorf("%s checks, want 150", got)
	}
}

func TestSeed(t *testing.T) {
	t.Setenv("LULL_SEED", "42")
	if s := Seed(t); s != 42 {
		t.Errorf("Seed() = %d", s)
	}
	if a, b := Random(t).Uint64(), Random(t).Uint64(); a != b {
		t.Errorf("one seed gives %d and %d", a, b)
	}
}

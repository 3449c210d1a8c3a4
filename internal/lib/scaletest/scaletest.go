// Package scaletest scales the number of draws, cycles and kills in tests, and
// provides the seeds of random tests.
//
// LULL_DRAWS is a factor for every such number, 1 by default: make check uses a
// fraction, make soak a multiple. A number that has its own environment variable
// takes that value without scaling.
package scaletest

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	_ "pgregory.net/rapid" // defines -rapid.checks
)

// factor returns the value of LULL_DRAWS.
func factor() (float64, error) {
	v := os.Getenv("LULL_DRAWS")
	if v == "" {
		return 1, nil
	}
	f, err := strconv.ParseFloat(v, 64)
	if err != nil || !(f > 0 && f <= 1e6) {
		return 0, fmt.Errorf("cannot use LULL_DRAWS=%q: want a number above 0 and up to 1000000", v)
	}
	return f, nil
}

// scaled returns n times LULL_DRAWS, at least 1.
func scaled(n int) (int, error) {
	f, err := factor()
	return max(1, int(float64(n)*f)), err
}

// N returns n times LULL_DRAWS, at least 1.
func N(t testing.TB, n int) int {
	t.Helper()
	n, err := scaled(n)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Count returns the value of the environment variable name, which must be above
// 0. If it is not set, Count returns n times LULL_DRAWS, at least 1.
func Count(t testing.TB, name string, n int) int {
	t.Helper()
	v := os.Getenv(name)
	if v == "" {
		return N(t, n)
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 {
		t.Fatalf("cannot use %s=%q: want a number above 0", name, v)
	}
	return n
}

// Rapid sets the number of draws of every rapid.Check in the test binary to n
// times LULL_DRAWS. Call it from an init function of a test file, so that the
// flag -rapid.checks still takes precedence.
func Rapid(n int) {
	n, err := scaled(n)
	if err == nil {
		err = flag.Set("rapid.checks", strconv.Itoa(n))
	}
	if err != nil {
		panic(err)
	}
}

// Seed returns LULL_SEED, or a new seed if that is not set, and logs it.
func Seed(t testing.TB) uint64 {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if v := os.Getenv("LULL_SEED"); v != "" {
		n, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			t.Fatalf("cannot use LULL_SEED=%q: want a number", v)
		}
		seed = n
	}
	t.Logf("LULL_SEED=%d", seed)
	return seed
}

// Random returns a random number generator with a seed from Seed.
func Random(t testing.TB) *rand.Rand {
	t.Helper()
	return rand.New(rand.NewPCG(Seed(t), 1))
}

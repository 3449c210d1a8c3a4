package cml

import (
	"flag"
	"os"
	"testing"
)

// A drawn history takes a fraction of a millisecond here, so the properties are
// tried more often than rapid's hundred times unless the command line says
// otherwise.
func TestMain(m *testing.M) {
	flag.Set("rapid.checks", "3000")
	flag.Parse()
	os.Exit(m.Run())
}

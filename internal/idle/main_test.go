package idle

import (
	"flag"
	"os"
	"testing"
)

// A check takes microseconds here, so the laws are tried far more often than
// rapid's hundred times unless the command line says otherwise.
func TestMain(m *testing.M) {
	flag.Set("rapid.checks", "5000")
	flag.Parse()
	os.Exit(m.Run())
}

package options

import (
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// TestDurations checks that settings accept the same forms of durations as the verbs.
func TestDurations(t *testing.T) {
	all := []Option[time.Duration]{New("every", "EVERY", "duration", "", func(d *time.Duration) any { return d })}
	for text, want := range map[string]time.Duration{"1d": 24 * time.Hour, "90m": 90 * time.Minute, "0": 0} {
		var d time.Duration
		if _, err := Read(&d, all, File{}, func(string) string { return text }, pflag.NewFlagSet("", pflag.ContinueOnError)); err != nil || d != want {
			t.Errorf("%s: %s, %v", text, d, err)
		}
	}
}

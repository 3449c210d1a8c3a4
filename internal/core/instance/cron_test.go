package instance

import (
	"testing"
	"time"
)

// FuzzParseCron checks that every accepted schedule has a next time, and that it
// is after now.
func FuzzParseCron(f *testing.F) {
	for _, text := range []string{"*/10 * * * *", "@every 10m", "@hourly", "CRON_TZ=Europe/Berlin 0 9 * * mon-fri", "TZ=UTC", "CRON_TZ=", "TZ= @daily",
		"0 0 30 2 *", "0 0 */2 * 1", "@every -1s", "60 * * * *", "*/0 * * * *", ""} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseCron(text)
		if (s == nil) == (err == nil) {
			t.Fatalf("%q: %v, %v", text, s, err)
		}
		if now := time.Now(); err == nil && !s.Next(now).IsZero() && !s.Next(now).After(now) {
			t.Errorf("%q: %v after %v", text, s.Next(now), now)
		}
	})
}

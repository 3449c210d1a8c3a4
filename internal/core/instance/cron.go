package instance

import (
	"fmt"
	"strings"
	"time"

	"github.com/robfig/cron/v3"
)

// Cron is a schedule of times. Next returns the first one after t.
type Cron interface {
	Next(t time.Time) time.Time
}

// maxCron bounds the text of a schedule, in bytes.
const maxCron = 128

// ParseCron parses a schedule. It is a crontab schedule (minute, hour, day of the
// month, month, day of the week), @hourly and the like, or @every 10m. A prefix
// sets the time zone (CRON_TZ=Europe/Berlin); the default is the machine's. A
// schedule that never occurs is an error.
func ParseCron(text string) (Cron, error) {
	if len(text) > maxCron || strings.TrimSpace(text) == "" {
		return nil, fmt.Errorf("%.40q is not a schedule: want one such as */10 * * * *", text)
	}
	if zone, _, more := strings.Cut(text, " "); strings.Contains(zone, "TZ=") && !more { // the parser would panic
		return nil, fmt.Errorf("%q has a zone and no schedule: want one such as %s */10 * * * *", text, zone)
	}
	s, err := cron.ParseStandard(text)
	if err != nil {
		return nil, fmt.Errorf("%q is not a schedule such as */10 * * * *: %w", text, err)
	}
	if s.Next(time.Unix(0, 0)).IsZero() {
		return nil, fmt.Errorf("%q never occurs", text)
	}
	return s, nil
}

package crontab

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/robfig/cron/v3"
)

// job is one line of a crontab.
type job struct {
	schedule cron.Schedule
	zone     *time.Location
	where    string // FILE:LINE
}

// style describes how the daemon whose files are read differs from others.
type style struct {
	userColumn bool // lines have a user before the command
	cronie     bool // CRON_TZ sets the zone of the lines below it, RANDOM_DELAY delays them
	zone       *time.Location
	// find returns the time zone with a name.
	find func(name string) (*time.Location, error)
}

var (
	assignment = regexp.MustCompile(`^("[^"]*"|'[^']*'|[A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*(.*)$`)
	fields     = cron.NewParser(cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow)
	names      = cron.NewParser(cron.Descriptor)
)

// parse reads a crontab. Where the crons differ, every interpretation counts,
// because waking too often does no harm: a restricted day of the month beside a
// day of the week means either of the two, and a/b means every b from a on. A
// line that no cron accepts is an error with its file and line, and so is a
// random time.
func parse(file string, text []byte, s style) (jobs []job, err error) {
	zone, n := s.zone, 0
	for line := range strings.Lines(string(text)) {
		n++
		line = strings.Trim(line, " \t\r\n")
		bad := func(what string) ([]job, error) { return nil, fmt.Errorf("%s:%d: %s", file, n, what) }
		if line == "" || line[0] == '#' {
			continue
		}
		if m := assignment.FindStringSubmatch(line); m != nil {
			if name := strings.Trim(m[1], `"'`); name == "CRON_TZ" && s.cronie {
				if zone, err = s.find(strings.Trim(m[2], `"'`)); err != nil {
					return bad(err.Error())
				}
			} else if name == "RANDOM_DELAY" && s.cronie && strings.Trim(m[2], `"' 0`) != "" {
				return bad("the random delay of its jobs is not known")
			}
			continue
		}
		at, rest := cut(strings.TrimPrefix(line, "-"), 5) // in cronie, - only suppresses the log
		if line[0] == '@' {
			at, rest = cut(line, 1)
		}
		if _, command := cut(rest, 1); rest == "" || s.userColumn && command == "" {
			return bad("want a time and a command")
		}
		if at == "@reboot" {
			continue
		}
		schedule, err := when(at)
		if err != nil {
			return bad(err.Error())
		}
		jobs = append(jobs, job{schedule, zone, fmt.Sprintf("%s:%d", file, n)})
	}
	return jobs, nil
}

// cut returns the first n words of s, and the rest.
func cut(s string, n int) (words, rest string) {
	rest = s
	for range n {
		rest = strings.TrimLeft(rest, " \t")
		end := strings.IndexAny(rest, " \t")
		if end < 0 {
			end = len(rest)
		}
		words, rest = words+" "+rest[:end], rest[end:]
	}
	return strings.TrimSpace(words), strings.TrimLeft(rest, " \t")
}

// when parses the time fields of a line.
func when(at string) (cron.Schedule, error) {
	var s cron.Schedule
	var err error
	if at[0] == '@' {
		if strings.HasPrefix(at, "@every") {
			return nil, fmt.Errorf("%.40q is not a time", at)
		}
		s, err = names.Parse(at)
	} else {
		words := strings.Fields(at)
		if len(words) < 5 {
			return nil, fmt.Errorf("%.80q has fewer than five fields", at)
		}
		words[4] = sundays(words[4])
		s, err = fields.Parse(strings.Join(words, " "))
	}
	if err != nil {
		return nil, fmt.Errorf("%.80q is not a time that lull can compute", at)
	}
	if spec, ok := s.(*cron.SpecSchedule); ok {
		spec.Location = time.Local // interpret in the zone of the time passed to Next
	}
	return s, nil
}

// sundays rewrites day 7 of the week as day 0.
func sundays(dow string) string {
	parts := strings.Split(dow, ",")
	for n, part := range parts {
		span, step, stepped := strings.Cut(part, "/")
		low, high, ranged := strings.Cut(span, "-")
		every, err := strconv.Atoi(step)
		from := strings.Index("sunmontuewedthufrisat", strings.ToLower(low)) / 3
		if len(low) == 1 {
			from = int(low[0] - '0')
		}
		switch {
		case !ranged && low == "7":
			parts[n] = "0"
		case ranged && high == "7" && from == 7:
			parts[n] = "0"
		case ranged && high == "7" && from >= 0 && from < 7 && (!stepped || err == nil && every > 0):
			if parts[n] = low + "-6" + part[len(span):]; !stepped || (7-from)%every == 0 {
				parts[n] += ",0"
			}
		}
	}
	return strings.Join(parts, ",")
}

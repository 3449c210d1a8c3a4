package notify

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/warning"
	"lull/internal/platform/webhook"
)

// label is the text of the link for each verb.
var label = map[string]string{
	warning.Extend: "Extend by an hour", warning.NotToday: "Not today", warning.Stop: "Stop now",
}

// sentence describes an event for users. It contains user input (names,
// details), so it must be escaped wherever there is markup.
func sentence(e event, zone *time.Location) string {
	x := e.entry
	who := x.WorkerName
	if who == "" {
		who = x.WorkerID
	}
	if x.Region != "" {
		who += " (" + x.Region + ")"
	}
	by := ""
	if x.By.Name != "" {
		by = " by " + x.By.Name
	}
	because := ""
	if x.Reason != "" {
		because = ": " + strings.ReplaceAll(x.Reason, "_", " ")
	}
	var s string
	switch e.name {
	case audit.EventPauseWarning:
		s = who + " will be paused"
		if x.Warning != nil { // older servers did not record the warning
			s = x.Warning.Sentence(who, zone)
		}
		if e.late {
			s = x.Warning.Late(who, zone)
		}
		x.Detail = ""
	case audit.EventPaused:
		s = fmt.Sprintf("%s is being paused%s%s", who, by, because)
		if power.Reason(x.Reason).ByIdleness() {
			x.Detail = "" // Detail is a code here; the reason says the same
			if d := x.Decision; d != nil {
				x.Detail = fmt.Sprintf("idle for %s of %s", idle.HumanMinutes(d.Verdict.IdleMinutes), idle.Human(time.Duration(d.Policy.Timeout)))
			}
		}
	case audit.EventResumed:
		s = fmt.Sprintf("%s runs again: resumed by %s", who, x.Detail)
		x.Detail = ""
	case audit.EventPauseCancelled:
		s = fmt.Sprintf("The pause of %s was canceled", who)
	case audit.EventDrained:
		s = fmt.Sprintf("%s is drained and stopped%s", who, because)
	case audit.EventUnknownSignal:
		s = fmt.Sprintf("A signal of %s is unknown, so it is not paused", who)
	case audit.EventLateAction:
		s = fmt.Sprintf("A call for %s took effect after it was abandoned; lull undoes it", who)
	case audit.EventLateActivity:
		s = fmt.Sprintf("%s was paused while in use: the activity was reported too late", who)
	case audit.EventStatus:
		s = fmt.Sprintf("%s is %s", who, x.To)
	default:
		s = fmt.Sprintf("%s: %s%s%s", who, strings.NewReplacer("_", " ", ".", " ").Replace(e.name), by, because)
	}
	if x.Detail != "" {
		s += ": " + strings.TrimSuffix(x.Detail, ".")
	}
	return strings.Join(strings.Fields(s), " ")
}

// chat formats a message in Slack's markup.
func chat(m message, zone *time.Location) string {
	var b strings.Builder
	if len(m.events) > 1 {
		fmt.Fprintf(&b, "*%d events*\n", len(m.events))
	}
	for _, e := range m.events {
		if len(m.events) > 1 {
			fmt.Fprintf(&b, "%s  ", e.entry.At.In(zone).Format("Mon 15:04"))
		}
		b.WriteString(webhook.Escape(sentence(e, zone)) + ".\n")
		for i, verb := range verbs(e) {
			sep := " · "
			if i == 0 {
				sep = ""
			}
			fmt.Fprintf(&b, "%s<%s|%s>", sep, e.links[verb], label[verb])
		}
		if len(e.links) > 0 {
			b.WriteString("\n")
		}
		if start := start(e); start != "" {
			b.WriteString("Start it: `" + webhook.Escape(start) + "`")
			if e.page != "" {
				fmt.Fprintf(&b, " · <%s|See why, or start it>", e.page)
			}
			b.WriteString("\n")
		}
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// letter formats a message as a mail.
func letter(m message, zone *time.Location) (subject, body string) {
	var b strings.Builder
	subject = "lull: " + sentence(m.events[0], zone)
	if len(m.events) > 1 {
		subject = fmt.Sprintf("lull: %d events", len(m.events))
	}
	for _, e := range m.events {
		fmt.Fprintf(&b, "%s\n%s.\n", e.entry.At.In(zone).Format("Mon 2 Jan 2006 15:04 MST"), sentence(e, zone))
		for _, verb := range verbs(e) {
			fmt.Fprintf(&b, "\n%s:\n%s\n", label[verb], e.links[verb])
		}
		if len(e.links) > 0 {
			b.WriteString("\nEach link shows what it will do and asks first. They expire when you use one of them, when the worker is used, and at the pause.\n")
		}
		if start := start(e); start != "" {
			fmt.Fprintf(&b, "\nStart it: %s\n", start)
			if e.page != "" {
				fmt.Fprintf(&b, "See why, or start it:\n%s\n", e.page)
			}
		}
		b.WriteString("\n")
	}
	return subject, b.String()
}

// start returns the command that starts a worker that e reports as paused; empty for
// other events.
func start(e event) string {
	if e.name != audit.EventPaused || e.entry.WorkerID == "" {
		return ""
	}
	return "lull worker start " + cmp.Or(e.entry.WorkerName, e.entry.WorkerID)
}

// verbs returns the verbs of the answers that a warning offers, in order.
func verbs(e event) []string {
	var out []string
	for _, v := range warning.Answers() {
		if e.links[v] != "" {
			out = append(out, v)
		}
	}
	return out
}

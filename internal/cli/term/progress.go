package term

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// frames are the frames of the spinner. Each is shown for frameTime.
const (
	frames    = `|/-\`
	frameTime = 120 * time.Millisecond
)

// Progress shows the progress of a long operation on standard error: permanent lines
// and, on a terminal, a last line with a spinner. Close must be called before
// anything else is printed. It is safe for concurrent use.
type Progress struct {
	out   io.Writer
	width int
	live  bool // a spinner is shown
	start time.Time

	mu     sync.Mutex
	status string
	frame  int

	stop, ended chan struct{}
}

// Progress returns a Progress. Nothing is shown before the first Line or Status.
func (c *Term) Progress() *Progress {
	p := &Progress{out: c.Err, start: time.Now(), stop: make(chan struct{}), ended: make(chan struct{})}
	p.live = IsTerminal(c.Err) && c.Getenv("TERM") != "dumb"
	if p.width = c.screen(); p.width == 0 {
		p.width = 80
	}
	if !p.live {
		close(p.ended)
		return p
	}
	go p.spin()
	return p
}

func (p *Progress) spin() {
	defer close(p.ended)
	tick := time.NewTicker(frameTime)
	defer tick.Stop()
	for {
		select {
		case <-p.stop:
			return
		case <-tick.C:
			p.mu.Lock()
			p.frame = (p.frame + 1) % len(frames)
			p.draw()
			p.mu.Unlock()
		}
	}
}

// draw draws the last line. p.mu must be held.
func (p *Progress) draw() {
	if !p.live || p.status == "" {
		return
	}
	text := fmt.Sprintf("%c %s (%s)", frames[p.frame], p.status, time.Since(p.start).Truncate(time.Second))
	fmt.Fprintf(p.out, "\r\x1b[K%s", Shorten(text, max(p.width-1, minColumn)))
}

// Line prints a permanent line with the time of day.
func (p *Progress) Line(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
	fmt.Fprintf(p.out, "%s  %s\n", time.Now().Format(time.TimeOnly), text)
	p.draw()
}

// Status sets the text beside the spinner; "" removes the spinner.
func (p *Progress) Status(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.status != text {
		p.clear()
		p.status = text
		p.draw()
	}
}

// clear removes the last line. p.mu must be held.
func (p *Progress) clear() {
	if p.live && p.status != "" {
		fmt.Fprint(p.out, "\r\x1b[K")
	}
}

// Close removes the spinner.
func (p *Progress) Close() {
	if p.live {
		close(p.stop)
	}
	<-p.ended
	p.Status("")
}

package alarm

import (
	"testing"
	"time"
)

// TestAlarm sets an alarm to random times, earlier and later than the one before,
// and checks that Wait never returns early. Close must end Wait.
func TestAlarm(t *testing.T) {
	a, err := New()
	if err != nil {
		t.Fatal(err)
	}
	rung := make(chan time.Time)
	ended := make(chan struct{})
	go func() {
		for {
			a.Wait()
			select {
			case rung <- time.Now():
			case <-ended:
				close(rung)
				return
			}
		}
	}()
	for n := range 20 {
		at := time.Now().Add(time.Duration(n%5) * time.Millisecond)
		a.Set(at.Add(time.Hour))
		a.Set(at)
		if got := <-rung; got.Before(at) {
			t.Errorf("%s early", at.Sub(got))
		}
	}
	a.Set(time.Now().Add(-time.Hour)) // has passed
	<-rung
	const every = 3 * time.Millisecond
	began := time.Now()
	a.Every(every)
	for n := range 5 {
		if got, least := (<-rung).Sub(began), time.Duration(n+1)*every; got < least {
			t.Errorf("multiple %d came after %s", n+1, got)
		}
	}
	a.Set(time.Now().Add(time.Hour))
	a.Set(time.Time{})
	close(ended)
	a.Close()
	if _, ok := <-rung; ok {
		<-rung // Wait returned before the goroutine saw that the test has ended
	}
	a.Set(time.Now()) // a closed alarm ignores it
	a.Wait()
}

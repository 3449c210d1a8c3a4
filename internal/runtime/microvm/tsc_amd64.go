package microvm

import (
	"sync"
	"time"
)

// readTSC returns the processor's time stamp counter, which an emulated guest sees
// as its own.
func readTSC() uint64

// tscAt is the counter at a time.
type tscAt struct {
	ticks uint64
	at    time.Time
}

// readTSCAt returns the most exact of several readings.
func readTSCAt() (best tscAt) {
	exact := time.Hour
	for range 10 {
		began := time.Now()
		ticks := readTSC()
		if took := time.Since(began); took < exact {
			exact, best = took, tscAt{ticks, began.Add(took / 2)}
		}
	}
	return best
}

var tscAtStart = readTSCAt()

// tscSpan is the time over which the counter is measured. A reading is exact to
// less than a microsecond, so the result is to 20 millionths.
const tscSpan = 50 * time.Millisecond

// tscKHz returns the frequency of the counter, in kHz. It may wait for tscSpan.
var tscKHz = sync.OnceValue(func() int {
	time.Sleep(tscSpan - time.Since(tscAtStart.at))
	now := readTSCAt()
	return int(float64(now.ticks-tscAtStart.ticks) / (now.at.Sub(tscAtStart.at).Seconds() * 1000))
})

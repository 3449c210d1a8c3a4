package world

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"time"
)

// dice is a seeded random generator. Its state is one number, so that a saved world
// continues the same sequence.
type dice uint64

// seedDice returns a generator whose sequence is determined by a seed and names.
func seedDice(seed uint64, names ...string) dice {
	h := fnv.New64a()
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], seed)
	h.Write(b[:])
	for _, n := range names {
		h.Write([]byte(n))
		h.Write([]byte{0})
	}
	return dice(h.Sum64())
}

func (d *dice) next() uint64 {
	*d += 0x9e3779b97f4a7c15
	return mix(uint64(*d))
}

// mix is the finalizer of splitmix64.
func mix(z uint64) uint64 {
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
	z = (z ^ (z >> 27)) * 0x94d049bb133111eb
	return z ^ (z >> 31)
}

// unit returns a number in [0, 1).
func (d *dice) unit() float64 { return unit(d.next()) }

func unit(v uint64) float64 { return float64(v>>11) / (1 << 53) }

func (d *dice) below(n int) int {
	if n <= 1 {
		return 0
	}
	return int(d.next() % uint64(n))
}

// between returns a duration in [lo, hi].
func (d *dice) between(lo, hi time.Duration) time.Duration {
	if hi <= lo {
		return lo
	}
	return lo + time.Duration(d.unit()*float64(hi-lo))
}

// around returns a duration within the given share on either side of mean.
func (d *dice) around(mean time.Duration, share float64) time.Duration {
	return time.Duration(float64(mean) * (1 + share*(2*d.unit()-1)))
}

func (d *dice) uuid() string {
	a, b := d.next(), d.next()
	return fmt.Sprintf("%08x-%04x-4%03x-a%03x-%012x", uint32(a>>32), uint16(a>>16), a&0xfff, (b>>48)&0xfff, b&0xffffffffffff)
}

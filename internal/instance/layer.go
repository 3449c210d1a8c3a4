package instance

import "fmt"

// Sizes that the layer of a microVM may have, in bytes: the disk of what it
// writes over its image. The file is sparse; the size is what may be filled.
const (
	minLayer = 64 << 20
	maxLayer = 8 << 40
)

// CheckLayer says what is wrong with a layer's size; 0 is no layer.
func CheckLayer(size int64) error {
	if size != 0 && (size < minLayer || size > maxLayer || size%(1<<20) != 0) {
		return fmt.Errorf("%d bytes are no whole MiB between %d MiB and %d TiB, nor 0", size, minLayer>>20, maxLayer>>40)
	}
	return nil
}

package instance

import "fmt"

// Limits of the size of a microVM's layer, in bytes: the disk for what it
// writes over its image. The file is sparse; the size is its maximum.
const (
	minLayer = 64 << 20
	maxLayer = 8 << 40
)

// CheckLayer says what is wrong with a layer's size; 0 is no layer.
func CheckLayer(size int64) error {
	if size != 0 && (size < minLayer || size > maxLayer || size%(1<<20) != 0) {
		return fmt.Errorf("%d bytes: want 0, or whole MiB from %d MiB to %d TiB", size, minLayer>>20, maxLayer>>40)
	}
	return nil
}

package instance

import "fmt"

// Limits of the size of a microVM's layer, in bytes. The layer is the disk for
// what the microVM writes over its image. Its file is sparse; the size is its
// maximum.
const (
	minLayer = 64 << 20
	maxLayer = 8 << 40
)

// CheckLayer returns an error unless size is valid for a layer. 0 means no layer.
func CheckLayer(size int64) error {
	if size != 0 && (size < minLayer || size > maxLayer || size%(1<<20) != 0) {
		return fmt.Errorf("%d bytes: want 0, or whole MiB from %d MiB to %d TiB", size, minLayer>>20, maxLayer>>40)
	}
	return nil
}

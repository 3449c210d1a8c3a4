package instance

import (
	"bytes"
	"io"
	"testing"
)

func TestCapture(t *testing.T) {
	for more, cut := range []bool{false, true} {
		o, err := Capture(func(s Streams) (int, error) {
			_, err := io.Copy(s.Out, bytes.NewReader(make([]byte, MaxOutput+more)))
			return 3, err
		})
		if err != nil || o.ExitCode != 3 || len(o.Stdout) != MaxOutput || o.Truncated != cut {
			t.Errorf("%d kept of %d, truncated %v, %v", len(o.Stdout), MaxOutput+more, o.Truncated, err)
		}
	}
}

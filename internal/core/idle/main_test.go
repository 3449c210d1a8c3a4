package idle

import "lull/internal/lib/scaletest"

// More than rapid's default of 100 draws: a check takes microseconds here.
func init() { scaletest.Rapid(3000) }

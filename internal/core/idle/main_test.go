package idle

import "lull/internal/lib/scaletest"

// 3000 draws instead of rapid's 100: a check takes microseconds here.
func init() { scaletest.Rapid(3000) }

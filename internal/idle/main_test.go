package idle

import "lull/internal/base/scaletest"

// More than the 100 draws of rapid: a check takes microseconds here.
func init() { scaletest.Rapid(3000) }

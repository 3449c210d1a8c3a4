package cml

import "lull/internal/lib/scaletest"

// More than the 100 draws of rapid: a drawn history takes a fraction of a millisecond here.
func init() { scaletest.Rapid(500) }

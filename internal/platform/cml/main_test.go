package cml

import "lull/internal/lib/scaletest"

// 500 draws instead of rapid's 100: checking a drawn history takes a fraction of
// a millisecond here.
func init() { scaletest.Rapid(500) }

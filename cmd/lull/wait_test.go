package main

import (
	"strings"
	"time"
)

func contains(s, sub string) bool { return strings.Contains(s, sub) }

// pause is between two looks of a loop that waits for a condition.
func pause() { <-time.After(50 * time.Millisecond) }

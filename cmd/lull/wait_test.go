package main

import (
	"strings"
	"time"
)

func contains(s, sub string) bool { return strings.Contains(s, sub) }

// pause waits between two checks of a condition.
func pause() { <-time.After(50 * time.Millisecond) }

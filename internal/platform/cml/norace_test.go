//go:build !race

package cml

const raceDetector = false

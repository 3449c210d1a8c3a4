//go:build race

package cml

const raceDetector = true

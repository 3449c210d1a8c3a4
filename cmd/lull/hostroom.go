package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"lull/internal/cli/term"
	"lull/internal/core/instance"
)

// maxReserve is the maximum memory, in bytes, that an automatic budget leaves to the
// rest of the machine. Up to that it leaves a tenth.
const maxReserve = 1 << 30

// budget returns the memory budget for instances of known size, 0 for no limit, and a
// function that reads how much memory the machine has available. The function is nil
// if a user has set the budget.
func (c hostConfig) budget() (bytes int64, available func() (int64, error), err error) {
	switch c.Memory {
	case "0":
		return 0, nil, nil
	case "auto":
	default:
		if bytes, err = term.ParseSize(c.Memory); err == nil && bytes == 0 {
			err = errors.New("empty value: want a size such as 8G, auto or 0")
		}
		return bytes, nil, err
	}
	total, _, err := readMeminfo()
	if err != nil {
		return 0, nil, err
	}
	reserve := min(total/10, maxReserve)
	return total - reserve, func() (int64, error) {
		_, left, err := readMeminfo()
		return left - reserve, err
	}, nil
}

// imageSpace returns the maximum total size of images in bytes, 0 for no limit.
func (c hostConfig) imageSpace() (int64, error) {
	if c.ImageSpace == "0" {
		return 0, nil
	}
	return term.ParseSize(c.ImageSpace)
}

// layer returns the maximum size in bytes of a microVM's writable disk; 0 keeps
// changes in guest memory.
func (c hostConfig) layer() (int64, error) {
	if c.Layer == "0" {
		return 0, nil
	}
	size, err := term.ParseSize(c.Layer)
	if err == nil {
		err = instance.CheckLayer(size)
	}
	return size, err
}

// readMeminfo returns the machine's total and available memory in bytes.
func readMeminfo() (total, available int64, err error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0, fmt.Errorf("cannot read this machine's memory: %w", err)
	}
	for line := range bytes.Lines(b) {
		fmt.Sscanf(string(line), "MemTotal: %d kB", &total)
		fmt.Sscanf(string(line), "MemAvailable: %d kB", &available)
	}
	if total == 0 || available == 0 {
		return 0, 0, errors.New("cannot read this machine's memory: no MemAvailable in /proc/meminfo")
	}
	return total << 10, available << 10, nil
}

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"lull/internal/cli/term"
	"lull/internal/core/instance"
)

// maxReserve is the most that an automatic budget leaves to the rest of the
// machine, in bytes; it leaves a tenth otherwise.
const maxReserve = 1 << 30

// budget is the memory of instances of a known size, 0 for no bound, and what
// reads how much the machine can still give; nil where a user set the bound.
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

// readMeminfo is the machine's memory and what of it can be had, in bytes.
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

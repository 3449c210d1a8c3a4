package main

import (
	"log/slog"
	"strconv"
	"time"

	"lull/internal/platform/journal"
)

// journal returns the options of the server's evidence journal. validate has checked
// the numbers.
func (cfg *serverConfig) journal(log *slog.Logger) journal.Options {
	days, _ := strconv.Atoi(cfg.EvidenceDays)
	size, _ := strconv.ParseInt(cfg.EvidenceMiB, 10, 64)
	return journal.Options{Keep: time.Duration(days) * 24 * time.Hour, MaxBytes: size << 20, Log: log}
}

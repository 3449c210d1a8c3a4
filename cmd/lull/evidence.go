package main

import (
	"log/slog"
	"strconv"
	"time"

	"lull/internal/platform/journal"
)

// openEvidence opens a journal and tells what a crash has cost it.
func openEvidence(dir string, o journal.Options, log *slog.Logger) (*journal.Journal, error) {
	o.Log = log
	j, damage, err := journal.Open(dir, o)
	if err != nil {
		return nil, err
	}
	for _, d := range damage {
		log.Warn("evidence was corrupt and has been truncated", "damage", d)
	}
	return j, nil
}

// evidenceBounds are those of a server; validate has let only numbers through.
func (cfg *serverConfig) evidenceBounds() journal.Options {
	days, _ := strconv.Atoi(cfg.EvidenceDays)
	size, _ := strconv.ParseInt(cfg.EvidenceMiB, 10, 64)
	return journal.Options{Keep: time.Duration(days) * 24 * time.Hour, MaxBytes: size << 20}
}

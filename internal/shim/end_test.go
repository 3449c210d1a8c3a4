package shim

import (
	"errors"
	"log/slog"
	"testing"

	"lull/internal/protocol/shimctl"
)

// TestEndingShimWelcomesNobody checks that a daemon that connects before the shim
// decides to end keeps it running, and that a daemon that connects later is
// refused.
func TestEndingShimWelcomesNobody(t *testing.T) {
	s, err := New(Config{Dir: t.TempDir() + "/shim", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.dir.lock.Close()
	since := s.alone
	if _, err := s.welcome(); err != nil {
		t.Fatal(err)
	}
	if s.end(since) {
		t.Error("the shim ends although a daemon has come")
	}
	s.left()
	if s.end(since) {
		t.Error("the shim ends for an absence that is over")
	}
	if !s.end(s.alone) {
		t.Error("the shim does not end alone")
	}
	var refused *shimctl.Error
	if _, err := s.welcome(); !errors.As(err, &refused) || refused.Code != shimctl.CodeGone {
		t.Errorf("a daemon that comes too late: %v", err)
	}
}

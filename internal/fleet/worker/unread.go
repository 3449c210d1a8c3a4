package worker

import (
	"fmt"
	"strings"
	"time"

	"lull/internal/core/power"
)

// Unread says that EC2 cannot be read in a region, and therefore not for its workers.
type Unread struct {
	Region string    `json:"aws_region"`
	Since  time.Time `json:"since"`
	Error  string    `json:"error"`
}

// Sentence returns that as a sentence, without a full stop.
func (u *Unread) Sentence() string {
	return u.begins() + strings.TrimSuffix(u.Error, ".")
}

func (u *Unread) begins() string {
	return fmt.Sprintf("EC2 has not answered about %s since %s: ", u.Region, u.Since.UTC().Format(time.RFC3339))
}

// SaidOf reports whether the record of w already says that. The text of the error may
// differ between attempts.
func (u *Unread) SaidOf(w *Worker) bool { return strings.HasPrefix(w.StatusReason, u.begins()) }

// NeverSeen reports whether lull neither launched nor observed the instance in w's
// record, so that it may not exist.
func (w *Worker) NeverSeen() bool {
	return w.Imported && w.EC2State == "" && w.MissingSince == nil && w.Launch == nil
}

// Forgettable reports whether the record of w may be removed although EC2 has not
// confirmed that its instance is gone: it is being terminated, or was never seen.
func (w *Worker) Forgettable() bool {
	return w.Status == power.WorkerTerminating || w.Status == power.WorkerUnknown && w.NeverSeen()
}

// LeftBehind returns what a removed record may leave in the cloud; empty for a
// terminated worker.
func (w *Worker) LeftBehind() string {
	instance := "the instance of its launch"
	if w.EC2InstanceID != "" {
		instance = "instance " + w.EC2InstanceID
	}
	switch {
	case w.Status == power.WorkerTerminated || w.EC2InstanceID == "" && (w.Launch == nil || w.Launch.SentAt == nil):
		return ""
	case w.EC2State == "":
		return fmt.Sprintf("EC2 never reported %s in %s: if it exists, it keeps running and costing money", instance, w.AWSRegion)
	}
	return fmt.Sprintf("EC2 last reported %s for %s in %s: if it exists, it keeps running and costing money", w.EC2State, instance, w.AWSRegion)
}

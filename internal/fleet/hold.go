package fleet

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"regexp"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/worker"
)

// MaxSnooze is the maximum length of a worker's snooze.
const MaxSnooze = 30 * 24 * time.Hour

// SnoozeWorker protects a worker from automatic pauses until then. The zero time ends
// the protection. Errors: NotFound, Invalid.
func (f *Fleet) SnoozeWorker(ctx context.Context, by audit.Actor, id string, until time.Time) (worker.Worker, error) {
	if ahead := time.Until(until); !until.IsZero() && (ahead <= 0 || ahead > MaxSnooze) {
		return worker.Worker{}, failure.Invalidf("until", "%s is not within the next %s", until.Format(time.RFC3339), idle.Human(MaxSnooze))
	}
	return f.Change(ctx, id, Changing{By: by}, func(w *worker.Worker, tx *worker.Tx) error {
		if until.IsZero() {
			w.SnoozedUntil, w.SnoozedBy = nil, ""
			tx.Note(audit.Entry{Action: "snooze_ended"})
			return nil
		}
		w.Snooze(tx, until)
		return nil
	})
}

// SetIdleDetection enables or disables idle detection of one worker.
func (f *Fleet) SetIdleDetection(ctx context.Context, by audit.Actor, id string, on bool) (worker.Worker, error) {
	return f.Change(ctx, id, Changing{By: by}, func(w *worker.Worker, tx *worker.Tx) error {
		if w.IsIdleDetectionEnabled == on {
			return nil
		}
		w.IsIdleDetectionEnabled = on
		tx.Note(audit.Entry{Action: "idle_detection_toggled", Events: []string{audit.EventDetection}, Detail: fmt.Sprintf("enabled=%t", on)})
		return nil
	})
}

// ArmWorker ends the dry run of one worker or, if on is false, begins it.
func (f *Fleet) ArmWorker(ctx context.Context, by audit.Actor, id string, on bool) (worker.Worker, error) {
	return f.Change(ctx, id, Changing{By: by}, func(w *worker.Worker, tx *worker.Tx) error {
		if w.Armed == on {
			return nil
		}
		w.Armed = on
		action := "armed"
		if !on {
			action = "disarmed"
		}
		tx.Note(audit.Entry{Action: action})
		return nil
	})
}

// NewWakeToken creates a wake token for a worker, replacing any earlier one.
// The token is returned once and stored hashed.
func (f *Fleet) NewWakeToken(ctx context.Context, by audit.Actor, id string) (string, error) {
	token := "wake_" + rand.Text()
	_, err := f.Change(ctx, id, Changing{By: by}, func(w *worker.Worker, tx *worker.Tx) error {
		w.WakeTokenHash = hashToken(token)
		tx.Note(audit.Entry{Action: "wake_token_made"})
		return nil
	})
	return token, err
}

func hashToken(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// WakeWorker resumes a worker by its wake token, as an automatic action. A wrong
// token is a NotFound, like a missing worker. Errors: Refused if wakes come faster
// than WAKE_INTERVAL_SECONDS, during a halt, or because of the status.
func (f *Fleet) WakeWorker(ctx context.Context, id, token string) (worker.Worker, error) {
	by := audit.Actor{Name: "wake token", Kind: audit.KindWake}
	return f.Change(ctx, id, Changing{By: by, Limits: true, Rules: true}, func(w *worker.Worker, tx *worker.Tx) error {
		if w.WakeTokenHash == "" || subtle.ConstantTimeCompare([]byte(hashToken(token)), []byte(w.WakeTokenHash)) != 1 {
			return &failure.NotFound{Kind: "worker", Name: id}
		}
		// A last wake in the future was recorded by a wrong clock and does not count.
		if at := w.LastWakeAt; at != nil && tx.Now.Sub(*at) < tx.Settings.WakeInterval && at.Sub(tx.Now) <= time.Minute {
			return &failure.Refused{Command: "wake", Name: w.Name, Reason: "rate_limited",
				Detail: fmt.Sprintf("it was woken less than %s ago", idle.Human(tx.Settings.WakeInterval))}
		}
		if tx.Halted {
			return &failure.Refused{Command: "wake", Name: w.Name, Reason: "halted", Detail: "automatic actions are halted"}
		}
		if err := f.frozen(tx.Now, w, "wake"); err != nil {
			return err
		}
		if err := f.overdue(tx.Now, w, "wake"); err != nil {
			return err
		}
		if err := w.IntendStart(tx, worker.OriginAuto); err != nil {
			return err
		}
		now := tx.Now
		w.LastWakeAt = &now
		return nil
	})
}

var licenseToken = regexp.MustCompile(`^[a-zA-Z0-9+/%=-]{1,256}$`)

// RegisterLicense requests the registration of a worker's CML. token may be a
// reference or, with a sealing key, the token. Errors: NotFound, Invalid,
// Conflict while another operation is in progress.
func (f *Fleet) RegisterLicense(ctx context.Context, by audit.Actor, id, token string, reregister bool) (worker.Worker, error) {
	if token == "" || len(token) > 4096 {
		return worker.Worker{}, failure.Invalidf("token", "it must have 1 to 4096 bytes")
	}
	ref, err := f.opts.Seal.Seal("token", token)
	if err != nil {
		return worker.Worker{}, err
	}
	if string(ref) != token && !licenseToken.MatchString(token) {
		return worker.Worker{}, failure.Invalidf("token", "want 1 to 256 letters, digits or +/%%=-")
	}
	return f.requestLicense(ctx, by, id, worker.OperationRegister, ref, reregister)
}

// DeregisterLicense requests the release of the license.
func (f *Fleet) DeregisterLicense(ctx context.Context, by audit.Actor, id string) (worker.Worker, error) {
	return f.requestLicense(ctx, by, id, worker.OperationDeregister, "", false)
}

func (f *Fleet) requestLicense(ctx context.Context, by audit.Actor, id, op string, token sealed.Secret, reregister bool) (worker.Worker, error) {
	return f.Change(ctx, id, Changing{By: by}, func(w *worker.Worker, tx *worker.Tx) error {
		l := &w.License
		switch {
		case w.Status == power.WorkerTerminating || w.Status == power.WorkerTerminated:
			return &failure.Refused{Command: op + " the license of", Name: w.Name, Reason: "status", Detail: fmt.Sprintf("it is %s", w.Status)}
		case l.OperationInProgress != nil && w.Status == power.WorkerRunning:
			return &failure.Conflict{Kind: "license of worker", Name: id, Detail: "CML has not completed an earlier request: " + l.PendingOperation}
		case l.PendingOperation == op && op == worker.OperationDeregister:
			return nil
		}
		l.PendingOperation, l.LastError, l.Reregister, l.Token = op, "", reregister, token
		l.OperationInProgress = nil // left by an operation that was interrupted when the machine went down
		tx.Note(audit.Entry{Action: "license_requested", Events: []string{audit.EventLicense}, Detail: op})
		return nil
	})
}

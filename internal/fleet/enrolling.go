package fleet

import (
	"context"
	"errors"
	"strconv"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
)

// Enrolling returns the worker whose machine may enroll with a secret, and the
// generation of the worker's launch. It does not check whether the secret was used
// before. Errors: ErrEnrollment, Refused with "enrollment_expired", those of the
// store.
func (f *Fleet) Enrolling(ctx context.Context, now time.Time, secret string) (worker.Worker, error) {
	id, generation, err := f.ReadSecret(secret)
	if err != nil {
		return worker.Worker{}, err
	}
	w, err := f.Worker(ctx, id)
	if _, none := errors.AsType[*failure.NotFound](err); none {
		return worker.Worker{}, launch.ErrEnrollment
	} else if err != nil {
		return worker.Worker{}, err
	}
	switch l := w.Launch; {
	case l == nil, !l.Agent, strconv.FormatInt(l.Generation, 10) != generation,
		w.Status == power.WorkerTerminating, w.Status == power.WorkerTerminated:
		return worker.Worker{}, launch.ErrEnrollment
	case now.After(l.ResolvedAt.Add(enrollWithin)):
		return worker.Worker{}, &failure.Refused{Command: "enroll the machine of", Name: w.Name, Reason: "enrollment_expired",
			Detail: "its secret expired " + l.ResolvedAt.Add(enrollWithin).Format(time.RFC3339)}
	}
	return w, nil
}

// enrollWithin is how long after the parameters of a launch were fixed its machine
// can enroll.
const enrollWithin = time.Hour

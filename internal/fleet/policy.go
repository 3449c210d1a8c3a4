package fleet

import (
	"context"
	"errors"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/policy"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
)

// errRules requests that the change is repeated with newer rules.
var errRules = errors.New("newer rules are needed")

// subject returns the properties of w that rules match against. tmpl is the worker's
// template and may be nil.
func (f *Fleet) subject(w *worker.Worker, tmpl *launch.Template) *policy.Subject {
	s := w.Subject()
	if tmpl != nil && tmpl.IdleDetection != nil {
		s.Template, s.FromTmpl = tmpl.Name, tmpl.Values(f.Settings())
	}
	return s
}

// Policy returns the effective policy of a worker now, with its template.
func (f *Fleet) Policy(ctx context.Context, w *worker.Worker) (policy.Resolved, error) {
	if w.TemplateName == "" {
		return f.PolicyWith(time.Now(), w, nil), nil
	}
	t, err := f.Template(ctx, w.TemplateName)
	if _, missing := errors.AsType[*failure.NotFound](err); missing {
		return f.PolicyWith(time.Now(), w, nil), nil
	}
	if err != nil {
		return policy.Resolved{}, err
	}
	return f.PolicyWith(time.Now(), w, &t), nil
}

// PolicyWith is Policy at a time with a given template, which may be nil.
func (f *Fleet) PolicyWith(now time.Time, w *worker.Worker, tmpl *launch.Template) policy.Resolved {
	return f.Rules().Resolve(now, f.Settings().Base(), f.subject(w, tmpl))
}

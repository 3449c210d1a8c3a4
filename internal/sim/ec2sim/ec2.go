// Package ec2sim implements EC2's and STS's query protocol for a simulated
// world.
//
// It serves the actions that a controller of workers and an on-instance agent
// use, with EC2's rules of pagination, filters, idempotence, DryRun, error
// codes and permissions, so that unmodified AWS SDKs and awscli work with it.
// Every other action is refused with InvalidAction.
//
// It does not verify signatures, and omits every field that no client of this
// project has asked for.
package ec2sim

import (
	"errors"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"lull/internal/sim/fault"
	"lull/internal/sim/wire"
	"lull/internal/sim/world"
)

const namespace = "http://ec2.amazonaws.com/doc/2016-11-15/"

// EC2 serves the EC2 API.
type EC2 struct {
	w   *world.World
	ids atomic.Uint64
}

// New returns an EC2 for w.
func New(w *world.World) *EC2 { return &EC2{w: w} }

// call is one request in progress.
type call struct {
	w      *world.World
	form   wire.Form
	who    world.Principal
	region string
	action string
	x      wire.XML
}

// actions maps each action to its handler. targets names the parameter that
// contains instance ids, for faults and permissions.
var actions = map[string]struct {
	serve   func(*call) error
	targets string
}{
	"RunInstances":              {serve: (*call).runInstances},
	"DescribeInstances":         {serve: (*call).describeInstances, targets: "InstanceId"},
	"DescribeInstanceStatus":    {serve: (*call).describeInstanceStatus, targets: "InstanceId"},
	"StartInstances":            {serve: (*call).startInstances, targets: "InstanceId"},
	"StopInstances":             {serve: (*call).stopInstances, targets: "InstanceId"},
	"TerminateInstances":        {serve: (*call).terminateInstances, targets: "InstanceId"},
	"RebootInstances":           {serve: (*call).rebootInstances, targets: "InstanceId"},
	"CreateTags":                {serve: (*call).createTags, targets: "ResourceId"},
	"DeleteTags":                {serve: (*call).deleteTags, targets: "ResourceId"},
	"DescribeTags":              {serve: (*call).describeTags},
	"DescribeImages":            {serve: (*call).describeImages},
	"DescribeVolumes":           {serve: (*call).describeVolumes},
	"DescribeAddresses":         {serve: (*call).describeAddresses},
	"DescribeInstanceAttribute": {serve: (*call).describeInstanceAttribute, targets: "InstanceId"},
	"ModifyInstanceAttribute":   {serve: (*call).modifyInstanceAttribute, targets: "InstanceId"},
	"DescribeInstanceTypes":     {serve: (*call).describeInstanceTypes},
	"DescribeRegions":           {serve: (*call).describeRegions},
	"DescribeSubnets":           {serve: (*call).describeSubnets},
	"DescribeSecurityGroups":    {serve: (*call).describeSecurityGroups},
}

// ServeHTTP answers one request.
func (h *EC2) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	form, err := wire.ParseForm(r)
	if err != nil {
		h.fail(w, world.Refuse("InvalidParameterValue", "%s", err))
		return
	}
	h.Serve(w, r, form)
}

// Serve answers a request whose form has already been read.
func (h *EC2) Serve(w http.ResponseWriter, r *http.Request, form wire.Form) {
	from := wire.CallerOf(r)
	c := &call{w: h.w, form: form, region: from.Region, action: form.Get("Action")}
	h.w.Calls.Count("ec2", c.action)
	act := actions[c.action]
	targets := []string(nil)
	if act.targets != "" {
		targets = form.List(act.targets)
		if len(targets) == 0 && form.Has(act.targets) {
			targets = []string{form.Get(act.targets)}
		}
	}
	e := h.w.Faults.Pick(h.w.Clock.Now().Wire, fault.Call{Service: "ec2", Action: c.action, Region: c.region, Targets: targets})
	e.Serve(w, r, func(w http.ResponseWriter, rule fault.Rule) { h.fail(w, faultError(rule)) }, func(w http.ResponseWriter) {
		if act.serve == nil {
			h.fail(w, world.Refuse("InvalidAction", "The action %s is not valid for this web service.", c.action))
			return
		}
		c.x.Take()
		defer c.x.Give()
		if err := h.do(c, from, act.serve, targets); err != nil {
			h.fail(w, err)
			return
		}
		h.answer(w, c)
	})
}

func (h *EC2) do(c *call, from wire.Caller, serve func(*call) error, targets []string) error {
	who, refusal := h.w.Principal(from.Key, from.Session)
	if refusal != nil {
		if refusal.Code == "InvalidClientTokenId" {
			return &world.Error{Code: "AuthFailure", Status: 401, Message: "AWS was not able to validate the provided access credentials"}
		}
		return refusal
	}
	c.who = who
	if h.w.Throttled(who.Account, c.region, c.action) {
		return &world.Error{Code: "RequestLimitExceeded", Status: 503, Message: "Request limit exceeded."}
	}
	changes := !strings.HasPrefix(c.action, "Describe")
	if !changes {
		targets = nil
	}
	if !h.w.May(who, "ec2:"+c.action, targets) {
		return &world.Error{Code: "UnauthorizedOperation", Status: 403, Message: "You are not authorized to perform this operation. User: " + who.ARN + " is not authorized to perform: ec2:" + c.action}
	}
	if dry, err := c.form.Bool("DryRun"); err != nil {
		return err
	} else if dry && !changes {
		return dryRun()
	}
	c.x.OpenNS(c.action+"Response", namespace)
	c.x.Text("requestId", h.requestID())
	if err := serve(c); err != nil {
		return err
	}
	c.x.Close(c.action + "Response")
	return nil
}

// check must be called after all validation of a change. A DryRun ends there, with an
// error.
func (c *call) check() error {
	if dry, _ := c.form.Bool("DryRun"); dry {
		return dryRun()
	}
	return nil
}

func dryRun() error {
	return &world.Error{Code: "DryRunOperation", Status: 412, Message: "Request would have succeeded, but DryRun flag is set."}
}

func faultError(r fault.Rule) error {
	e := &world.Error{Code: r.Code, Status: r.Status, Message: r.Message}
	if e.Code == "" {
		e.Code = "InternalError"
	}
	if e.Message == "" {
		e.Message = "An error was asked for: " + e.Code
	}
	if e.Status == 0 {
		e.Status = 400
		switch e.Code {
		case "RequestLimitExceeded", "Unavailable", "ServiceUnavailable":
			e.Status = 503
		case "InternalError", "InsufficientInstanceCapacity":
			e.Status = 500
		case "UnauthorizedOperation":
			e.Status = 403
		}
	}
	return e
}

func (h *EC2) requestID() string {
	n := h.ids.Add(1)
	s := strconv.FormatUint(n, 16)
	return "5a110000-0000-4000-8000-" + strings.Repeat("0", 12-min(12, len(s))) + s
}

func (h *EC2) answer(w http.ResponseWriter, c *call) {
	b := c.x.Bytes()
	w.Header().Set("Content-Type", "text/xml;charset=UTF-8")
	setDate(w, h.w)
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	_, _ = w.Write(b) // a client that has disconnected is not a fault of the simulator
}

func setDate(w http.ResponseWriter, sim *world.World) {
	w.Header().Set("Date", sim.Clock.Now().Wire.UTC().Format(http.TimeFormat))
}

func (h *EC2) fail(w http.ResponseWriter, err error) {
	e, ok := errors.AsType[*world.Error](err)
	if !ok {
		e = world.Refuse("InvalidParameterValue", "%s", err)
	}
	var x wire.XML
	x.Open("Response")
	x.In("Errors", func() {
		x.In("Error", func() {
			x.Text("Code", e.Code)
			x.Text("Message", e.Message)
		})
	})
	x.Text("RequestID", h.requestID())
	x.Close("Response")
	w.Header().Set("Content-Type", "text/xml;charset=UTF-8")
	setDate(w, h.w)
	w.WriteHeader(e.Status)
	_, _ = w.Write(x.Bytes())
}

// page reads MaxResults and NextToken. after is the Seq after which the page begins.
func (c *call) page(least, most int) (limit int, after uint64, err error) {
	limit, err = c.form.Int("MaxResults", 0)
	if err != nil {
		return 0, 0, err
	}
	if c.form.Has("MaxResults") {
		if limit < least || limit > most {
			return 0, 0, world.Refuse("InvalidParameterValue", "Value ( %d ) for parameter maxResults is invalid. Expecting a value between %d and %d.", limit, least, most)
		}
	} else {
		limit = most
	}
	tok := c.form.Get("NextToken")
	if tok == "" {
		return limit, 0, nil
	}
	rest, ok := strings.CutPrefix(tok, tokenMark)
	if ok {
		after, err = strconv.ParseUint(rest, 36, 64)
	}
	if !ok || err != nil {
		return 0, 0, world.Refuse("InvalidParameterValue", "Invalid value '%.64s' for parameter NextToken", tok)
	}
	return limit, after, nil
}

const tokenMark = "lullsim-page-"

func (c *call) next(after uint64) {
	if after > 0 {
		c.x.Text("nextToken", tokenMark+strconv.FormatUint(after, 36))
	}
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") }

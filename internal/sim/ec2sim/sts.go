package ec2sim

import (
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"lull/internal/sim/fault"
	"lull/internal/sim/wire"
	"lull/internal/sim/world"
)

const stsNamespace = "https://sts.amazonaws.com/doc/2011-06-15/"

// STS serves AssumeRole and GetCallerIdentity.
type STS struct{ w *world.World }

// NewSTS returns an STS for w.
func NewSTS(w *world.World) *STS { return &STS{w} }

// ServeHTTP answers one request.
func (s *STS) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	form, err := wire.ParseForm(r)
	if err != nil {
		s.fail(w, world.Refuse("InvalidParameterValue", "%s", err))
		return
	}
	s.Serve(w, r, form)
}

// Serve answers a request whose form has already been read.
func (s *STS) Serve(w http.ResponseWriter, r *http.Request, form wire.Form) {
	from, action := wire.CallerOf(r), form.Get("Action")
	s.w.Calls.Count("sts", action)
	e := s.w.Faults.Pick(s.w.Clock.Now().Wire, fault.Call{Service: "sts", Action: action, Region: from.Region})
	e.Serve(w, r, func(w http.ResponseWriter, rule fault.Rule) { s.fail(w, faultError(rule)) }, func(w http.ResponseWriter) {
		var x wire.XML
		x.OpenNS(action+"Response", stsNamespace)
		who, refusal := s.w.Principal(from.Key, from.Session)
		err := error(nil)
		switch {
		case refusal != nil:
			err = refusal
		case action == "GetCallerIdentity":
			x.In(action+"Result", func() {
				x.Text("Arn", who.ARN)
				x.Text("UserId", "AIDASIM"+who.Account)
				x.Text("Account", who.Account)
			})
		case action == "AssumeRole":
			err = s.assume(&x, form, who)
		default:
			err = world.Refuse("InvalidAction", "Could not find operation %.40s", action)
		}
		if err != nil {
			s.fail(w, err)
			return
		}
		x.In("ResponseMetadata", func() { x.Text("RequestId", "5a110000-0000-4000-8000-000000000000") })
		x.Close(action + "Response")
		w.Header().Set("Content-Type", "text/xml")
		setDate(w, s.w)
		_, _ = w.Write(x.Bytes())
	})
}

// assume returns credentials for a role. Any caller may assume any role of an
// existing account.
func (s *STS) assume(x *wire.XML, form wire.Form, who world.Principal) error {
	arn, session := form.Get("RoleArn"), form.Get("RoleSessionName")
	part := strings.Split(arn, ":")
	name := arn[strings.LastIndexByte(arn, '/')+1:]
	if len(part) != 6 || part[2] != "iam" || session == "" {
		return world.Refuse("ValidationError", "RoleArn and RoleSessionName must be valid")
	}
	if !s.w.HasRole(part[4], name) {
		return &world.Error{Code: "AccessDenied", Status: 403, Message: "User: " + who.ARN + " is not authorized to perform: sts:AssumeRole on resource: " + arn}
	}
	life, err := form.Int("DurationSeconds", 3600)
	if err != nil || life < 900 || life > 43200 {
		return world.Refuse("ValidationError", "DurationSeconds must be between 900 and 43200")
	}
	until := s.w.Clock.Now().Wire.Add(time.Duration(life) * time.Second)
	assumed := "arn:aws:sts::" + part[4] + ":assumed-role/" + name + "/" + session
	x.In("AssumeRoleResult", func() {
		x.In("Credentials", func() {
			x.Text("AccessKeyId", "ASIASIM"+strconv.FormatInt(until.Unix(), 36))
			x.Text("SecretAccessKey", "simulated")
			x.Text("SessionToken", world.SessionToken(world.Principal{Account: part[4], ARN: assumed, Role: name, Expires: until}))
			x.Time("Expiration", until)
		})
		x.In("AssumedRoleUser", func() {
			x.Text("Arn", assumed)
			x.Text("AssumedRoleId", "AROASIM:"+session)
		})
	})
	return nil
}

func (s *STS) fail(w http.ResponseWriter, err error) {
	e, ok := errors.AsType[*world.Error](err)
	if !ok {
		e = world.Refuse("ValidationError", "%s", err)
	}
	var x wire.XML
	x.OpenNS("ErrorResponse", stsNamespace)
	x.In("Error", func() {
		x.Text("Type", "Sender")
		x.Text("Code", e.Code)
		x.Text("Message", e.Message)
	})
	x.Text("RequestId", "5a110000-0000-4000-8000-000000000000")
	x.Close("ErrorResponse")
	w.Header().Set("Content-Type", "text/xml")
	setDate(w, s.w)
	w.WriteHeader(e.Status)
	_, _ = w.Write(x.Bytes())
}

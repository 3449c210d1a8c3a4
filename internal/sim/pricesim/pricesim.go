// Package pricesim implements GetProducts of the AWS Price List API for a
// simulated world, in its protocol awsJson1_1: on-demand prices of the world's
// instance types in its regions, and of gp2 and gp3 storage.
//
// The prices are the simulator's own and have nothing to do with those of AWS.
package pricesim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"lull/internal/sim/fault"
	"lull/internal/sim/wire"
	"lull/internal/sim/world"
)

// Target is the value of X-Amz-Target for every request of this service, up to
// the operation.
const Target = "AWSPriceListService."

// PriceList serves the Price List API.
type PriceList struct{ w *world.World }

// New returns a PriceList for w.
func New(w *world.World) *PriceList { return &PriceList{w} }

type request struct {
	ServiceCode string
	Filters     []struct{ Type, Field, Value string }
	MaxResults  int
}

// ServeHTTP answers one request.
func (p *PriceList) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	action := strings.TrimPrefix(r.Header.Get("X-Amz-Target"), Target)
	from := wire.CallerOf(r)
	p.w.Calls.Count("pricing", action)
	e := p.w.Faults.Pick(p.w.Clock.Now().Wire, fault.Call{Service: "pricing", Action: action, Region: from.Region})
	e.Serve(w, r, func(w http.ResponseWriter, rule fault.Rule) {
		p.fail(w, &world.Error{Code: rule.Code, Status: rule.Status, Message: rule.Message})
	}, func(w http.ResponseWriter) {
		list, err := p.answer(r, from, action)
		if err != nil {
			p.fail(w, err)
			return
		}
		p.send(w, http.StatusOK, map[string]any{"FormatVersion": "aws_v1", "PriceList": list})
	})
}

func (p *PriceList) answer(r *http.Request, from wire.Caller, action string) ([]string, error) {
	who, refusal := p.w.Principal(from.Key, from.Session)
	switch {
	case refusal != nil:
		return nil, refusal
	case !p.w.May(who, "pricing:"+action, nil):
		return nil, &world.Error{Code: "AccessDeniedException", Status: 400, Message: "User: " + who.ARN + " is not authorized to perform: pricing:" + action}
	case action != "GetProducts":
		return nil, world.Refuse("UnknownOperationException", "there is no operation %.40s", action)
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, wire.MaxBody))
	if err != nil {
		return nil, world.Refuse("InvalidParameterException", "%s", err)
	}
	var in request
	if err := json.Unmarshal(body, &in); err != nil {
		return nil, world.Refuse("InvalidParameterException", "%s", err)
	}
	if in.ServiceCode != "AmazonEC2" {
		return nil, world.Refuse("InvalidParameterException", "no service %.40q is sold here", in.ServiceCode)
	}
	f := map[string]string{}
	for _, x := range in.Filters {
		f[x.Field] = x.Value
	}
	return p.products(f), nil
}

// products returns the documents that match the fields f.
func (p *PriceList) products(f map[string]string) []string {
	out := []string{}
	if !slices.ContainsFunc(p.w.Config().Regions, func(r world.RegionConfig) bool { return r.Name == f["regionCode"] }) {
		return out
	}
	if t, ok := world.LookupType(f["instanceType"]); ok && f["productFamily"] == "" {
		out = append(out, document("Hrs", 0.012*float64(t.CPUs)+0.0000035*float64(t.MemoryMiB)))
	}
	if usd := map[string]float64{"gp2": 0.1, "gp3": 0.08}[f["volumeApiName"]]; usd > 0 {
		out = append(out, document("GB-Mo", usd))
	}
	return out
}

// document returns a product with one on-demand price, as JSON text.
func document(unit string, usd float64) string {
	return fmt.Sprintf(`{"product":{"sku":"SIM"},"serviceCode":"AmazonEC2","terms":{"OnDemand":{"SIM.T":{"priceDimensions":{"SIM.T.D":{"unit":%q,"pricePerUnit":{"USD":"%.10f"}}}}}}}`, unit, usd)
}

func (p *PriceList) fail(w http.ResponseWriter, err error) {
	e, ok := errors.AsType[*world.Error](err)
	if !ok {
		e = world.Refuse("InternalErrorException", "%s", err)
	}
	status := e.Status
	if status == 0 {
		status = http.StatusBadRequest
	}
	p.send(w, status, map[string]string{"__type": e.Code, "message": e.Message})
}

func (p *PriceList) send(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/x-amz-json-1.1")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // an error means that the client has disconnected
}

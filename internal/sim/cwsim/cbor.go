package cwsim

import (
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/fxamacker/cbor/v2"

	"lull/internal/sim/fault"
	"lull/internal/sim/wire"
	"lull/internal/sim/world"
)

// CBORPath is the prefix of the path of every rpc-v2-cbor request for
// CloudWatch; the operation's name follows.
const CBORPath = "/service/GraniteServiceVersion20100801/operation/"

var (
	encoder = mustMode(cbor.EncOptions{Time: cbor.TimeUnixMicro, TimeTag: cbor.EncTagRequired}.EncMode())
	decoder = mustMode(cbor.DecOptions{MaxArrayElements: 20_000, MaxMapPairs: 1000, MaxNestedLevels: 16}.DecMode())
)

func mustMode[T any](m T, err error) T {
	if err != nil {
		panic(err) // the options above are constants
	}
	return m
}

// ServeCBOR answers one rpc-v2-cbor request.
func (h *CloudWatch) ServeCBOR(w http.ResponseWriter, r *http.Request) {
	action := strings.TrimPrefix(r.URL.Path, CBORPath)
	c, e, err := h.admit(r, action)
	e.Serve(w, r, func(w http.ResponseWriter, rule fault.Rule) { h.failCBOR(w, ruleError(rule)) }, func(w http.ResponseWriter) {
		var out any
		if err == nil {
			out, err = h.doCBOR(c, action, r)
		}
		if err != nil {
			h.failCBOR(w, asError(err))
			return
		}
		h.sendCBOR(w, http.StatusOK, out)
	})
}

func (h *CloudWatch) doCBOR(c caller, action string, r *http.Request) (any, error) {
	if r.Method != http.MethodPost || r.Header.Get("Smithy-Protocol") != "rpc-v2-cbor" {
		return nil, world.Refuse("UnknownOperationException", "an rpc-v2-cbor request is a POST with its smithy-protocol header")
	}
	body, err := readBody(r)
	if err != nil {
		return nil, err
	}
	return h.operate(c, action, body)
}

func (h *CloudWatch) operate(c caller, action string, body []byte) (any, error) {
	switch action {
	case "GetMetricData":
		in, err := decode[dataRequest](body)
		if err != nil {
			return nil, err
		}
		return h.getMetricData(c, in)
	case "GetMetricStatistics":
		in, err := decode[statsRequest](body)
		if err != nil {
			return nil, err
		}
		return h.getMetricStatistics(c, in)
	case "ListMetrics":
		in, err := decode[listRequest](body)
		if err != nil {
			return nil, err
		}
		return h.listMetrics(c, in)
	case "PutMetricData":
		in, err := decode[putRequest](body)
		if err != nil {
			return nil, err
		}
		return nil, h.putMetricData(c, in)
	}
	return nil, world.Refuse("UnknownOperationException", "The operation %.40q is not known", action)
}

func decode[T any](b []byte) (T, error) {
	var v T
	if len(b) == 0 {
		return v, nil
	}
	if err := decoder.Unmarshal(b, &v); err != nil {
		return v, world.Refuse("SerializationException", "cannot read request: %s", err)
	}
	return v, nil
}

func readBody(r *http.Request) ([]byte, error) {
	src := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(io.LimitReader(r.Body, wire.MaxBody))
		if err != nil {
			return nil, fmt.Errorf("cannot read request: %w", err)
		}
		src = z
	}
	b, err := io.ReadAll(io.LimitReader(src, wire.MaxBody+1))
	if err != nil {
		return nil, fmt.Errorf("cannot read request: %w", err)
	}
	if len(b) > wire.MaxBody {
		return nil, fmt.Errorf("cannot read request: the body is larger than %d bytes", wire.MaxBody)
	}
	return b, nil
}

func (h *CloudWatch) sendCBOR(w http.ResponseWriter, status int, v any) {
	body := []byte{0xa0} // an empty map, for an operation without output
	if v != nil {
		b, err := encoder.Marshal(v)
		if err != nil {
			status, b = http.StatusInternalServerError, []byte{0xa0}
		}
		body = b
	}
	w.Header().Set("Content-Type", "application/cbor")
	w.Header().Set("Smithy-Protocol", "rpc-v2-cbor")
	w.Header().Set("Date", h.w.Clock.Now().Wire.UTC().Format(http.TimeFormat))
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

// failCBOR writes an error. Its name is in the body, as in CBOR, and in a header, as
// in the query protocol.
func (h *CloudWatch) failCBOR(w http.ResponseWriter, e *world.Error) {
	side := "Sender"
	if e.Status >= 500 {
		side = "Receiver"
	}
	w.Header().Set("X-Amzn-Query-Error", e.Code+";"+side)
	h.sendCBOR(w, e.Status, map[string]string{"__type": "com.amazonaws.cloudwatch#" + e.Code, "message": e.Message})
}

package server

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"
)

// located makes every fault of a problem document name its field. Faults of a
// call without a body are in its query. A value that could not be decoded is
// searched in the body.
func located(ctx huma.Context, _ string, v any) (any, error) {
	m, ok := v.(*huma.ErrorModel)
	if !ok {
		return v, nil
	}
	for _, e := range m.Errors {
		switch field, inBody := strings.CutPrefix(e.Location, "body."); {
		case inBody && (ctx.Method() == "GET" || ctx.Method() == "DELETE"):
			e.Location = "query." + strings.TrimPrefix(field, "query.")
		case e.Location == "body":
			body, _ := e.Value.(string)
			if e.Location, e.Message = undecoded(body, e.Message); e.Location != "body" {
				e.Value = nil // the complete body, which may hold a secret
			}
		}
		if last := e.Location[strings.LastIndexByte(e.Location, '.')+1:]; wanted[last] != "" && strings.HasPrefix(e.Message, "expected string to match pattern") {
			e.Message = wanted[last]
		}
	}
	return m, nil
}

// wanted explains the patterns of the document, by field.
var wanted = map[string]string{"from": "want a time of day from 00:00 to 24:00", "to": "want a time of day from 00:00 to 24:00"}

// goField matches how encoding/json names the field of a value of the wrong
// type.
var goField = regexp.MustCompile(`^json: cannot unmarshal (.{1,80}) into Go struct field [^. ]+\.(\S+) of type`)

// undecoded finds where in a body the undecodable value is, from the decoder's
// message: the field, or the text that it quotes.
func undecoded(body, says string) (where, message string) {
	if m := goField.FindStringSubmatch(says); m != nil {
		return "body." + m[2], m[1] + " is not valid here"
	}
	var v any
	if json.Unmarshal([]byte(body), &v) == nil {
		if path, ok := quoted(v, "body", says); ok {
			return path, says
		}
	}
	return "body", says
}

// quoted returns the path of the first text in v that says quotes.
func quoted(v any, path, says string) (string, bool) {
	switch v := v.(type) {
	case string:
		q := fmt.Sprintf("%.20q", v)
		return path, v != "" && strings.Contains(says, strings.TrimSuffix(q, `"`))
	case []any:
		for i, e := range v {
			if p, ok := quoted(e, fmt.Sprintf("%s[%d]", path, i), says); ok {
				return p, true
			}
		}
	case map[string]any:
		for _, k := range slices.Sorted(maps.Keys(v)) {
			if p, ok := quoted(v[k], path+"."+k, says); ok {
				return p, true
			}
		}
	}
	return "", false
}

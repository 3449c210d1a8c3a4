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

// located completes every fault of a problem document with the field it is about. In
// a call without a body, that is a query parameter. For a value that could not be
// decoded, the body is searched for it.
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
				e.Value = nil // otherwise this would be the whole body, which may hold a secret
			}
		}
		if last := e.Location[strings.LastIndexByte(e.Location, '.')+1:]; wanted[last] != "" && strings.HasPrefix(e.Message, "expected string to match pattern") {
			e.Message = wanted[last]
		}
	}
	return m, nil
}

// wanted explains, by field, the patterns of the OpenAPI document.
var wanted = map[string]string{"from": "want a time of day from 00:00 to 24:00", "to": "want a time of day from 00:00 to 24:00"}

// goField matches encoding/json's error for a value of the wrong type.
var goField = regexp.MustCompile(`^json: cannot unmarshal (.{1,80}) into Go struct field [^. ]+\.(\S+) of type`)

// undecoded locates an undecodable value in a body. says is the decoder's message,
// which names the field or quotes the value.
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

// quoted returns the path of the first string in v that the message says quotes.
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

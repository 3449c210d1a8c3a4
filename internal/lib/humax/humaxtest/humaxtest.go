// Package humaxtest checks the guarantees of package humax against a real API.
package humaxtest

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"
)

// Nulls encodes the zero value of every type in api's document as api would
// encode it in a response. It returns the places that are null although the
// document declares a list, and the places where the document allows a null list
// in a response. types is the number of types.
func Nulls(api huma.API) (found []string, types int, err error) {
	doc := api.OpenAPI()
	for _, name := range slices.Sorted(maps.Keys(doc.Components.Schemas.Map())) {
		t := doc.Components.Schemas.TypeFromRef("#/components/schemas/" + name)
		if t == nil || t == reflect.TypeFor[huma.ErrorModel]() || t == reflect.TypeFor[huma.ErrorDetail]() {
			continue
		}
		v, err := api.Transform(nil, "200", reflect.New(t).Elem().Interface())
		if err != nil {
			return nil, 0, fmt.Errorf("%s: %w", name, err)
		}
		data, err := json.Marshal(v)
		if err != nil {
			return nil, 0, fmt.Errorf("%s: %w", name, err)
		}
		var got any
		if err := json.Unmarshal(data, &got); err != nil {
			return nil, 0, fmt.Errorf("%s: %w", name, err)
		}
		types++
		for _, at := range NullLists(doc, doc.Components.Schemas.Map()[name], got) {
			found = append(found, name+at)
		}
	}
	return found, types, nil
}

// NullLists returns the places in v, a decoded response with schema s, that are
// null although s declares a list.
func NullLists(doc *huma.OpenAPI, s *huma.Schema, v any) (found []string) {
	var visit func(s *huma.Schema, v any, at string)
	visit = func(s *huma.Schema, v any, at string) {
		if s != nil && s.Ref != "" {
			s = doc.Components.Schemas.SchemaFromRef(s.Ref)
		}
		if s == nil {
			return
		}
		if s.Type == huma.TypeArray && v == nil {
			found = append(found, at)
		}
		switch v := v.(type) {
		case []any:
			for i, e := range v {
				visit(s.Items, e, fmt.Sprintf("%s[%d]", at, i))
			}
		case map[string]any:
			more, _ := s.AdditionalProperties.(*huma.Schema)
			for k, e := range v {
				p := s.Properties[k]
				if p == nil {
					p = more
				}
				visit(p, e, at+"."+k)
			}
		}
	}
	visit(s, v, "")
	slices.Sort(found)
	return found
}

// Nullable returns the lists in responses that doc declares as nullable, except
// those of types that requests use too.
func Nullable(doc *huma.OpenAPI) (found []string) {
	asked := map[string]bool{}
	refs := func(s *huma.Schema, to map[string]bool) {}
	refs = func(s *huma.Schema, to map[string]bool) {
		if s == nil {
			return
		}
		if name, ok := strings.CutPrefix(s.Ref, "#/components/schemas/"); ok {
			if to[name] {
				return
			}
			to[name] = true
			refs(doc.Components.Schemas.Map()[name], to)
		}
		refs(s.Items, to)
		for _, p := range s.Properties {
			refs(p, to)
		}
		if more, ok := s.AdditionalProperties.(*huma.Schema); ok {
			refs(more, to)
		}
	}
	for _, item := range doc.Paths {
		for _, op := range []*huma.Operation{item.Get, item.Put, item.Post, item.Delete, item.Patch} {
			if op != nil && op.RequestBody != nil {
				for _, m := range op.RequestBody.Content {
					refs(m.Schema, asked)
				}
			}
		}
	}
	for name, s := range doc.Components.Schemas.Map() {
		for k, p := range s.Properties {
			if !asked[name] && p.Type == huma.TypeArray && p.Nullable {
				found = append(found, name+"."+k)
			}
		}
	}
	slices.Sort(found)
	return found
}

package control

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Text from machines is shown on terminals and web pages, so it must be plain.
// The functions use reflection so that fields that are added later are covered.

// plain returns an error unless every text in v has at most MaxHostText bytes and
// no control characters. The error names the first invalid text.
func plain(v any) error {
	var first error
	walk(reflect.ValueOf(v), "", func(at string, t reflect.Value) {
		s := t.String()
		switch {
		case first != nil:
		case len(s) > MaxHostText:
			first = fmt.Errorf("%s: it is longer than %d bytes", at, MaxHostText)
		case !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl):
			first = errors.New(at + ": contains control characters or is not UTF-8")
		}
	}, nil)
	return first
}

// shorten changes every text in the value that v points to so that plain accepts
// it.
func shorten(v any) {
	walk(reflect.ValueOf(v), "", func(_ string, t reflect.Value) {
		s := strings.ToValidUTF8(t.String(), "\uFFFD")
		s = strings.Map(func(r rune) rune {
			if unicode.IsControl(r) {
				return ' '
			}
			return r
		}, s)
		for len(s) > MaxHostText {
			cut := MaxHostText - len("…")
			for !utf8.RuneStart(s[cut]) {
				cut--
			}
			s = s[:cut] + "…"
		}
		if t.CanSet() && s != t.String() { // do not write to a text that fits: it may be shared
			t.SetString(s)
		}
	}, nil)
}

// fill replaces every nil list and map in the value that v points to by an empty
// one.
func fill(v any) {
	walk(reflect.ValueOf(v), "", nil, func(t reflect.Value) {
		switch {
		case !t.IsNil() || !t.CanSet():
		case t.Kind() == reflect.Map:
			t.Set(reflect.MakeMap(t.Type()))
		default:
			t.Set(reflect.MakeSlice(t.Type(), 0, 0))
		}
	})
}

// walk calls text for every string below v, including map keys, and list for
// every slice and map. at is the path so far. Either function may be nil.
func walk(v reflect.Value, at string, text func(at string, t reflect.Value), list func(reflect.Value)) {
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			walk(v.Elem(), at, text, list)
		}
	case reflect.Struct:
		for f, x := range v.Fields() {
			if f.IsExported() { // skips the fields of time.Time
				walk(x, strings.TrimPrefix(at+"."+wireName(f), "."), text, list)
			}
		}
	case reflect.Slice, reflect.Array:
		if v.Kind() == reflect.Slice && list != nil {
			list(v)
		}
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return // bytes contain no strings
		}
		for n := range v.Len() {
			walk(v.Index(n), fmt.Sprintf("%s[%d]", at, n), text, list)
		}
	case reflect.Map:
		if list != nil {
			list(v)
		}
		for _, k := range v.MapKeys() {
			walk(k, at, text, list)
			walk(v.MapIndex(k), at, text, list)
		}
	case reflect.String:
		if text != nil {
			text(at, v)
		}
	}
}

// wireName returns a field's JSON name.
func wireName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	if name == "" {
		return f.Name
	}
	return name
}

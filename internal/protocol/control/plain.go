package control

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Text from machines is shown on terminals and pages. These functions use
// reflection, so that fields added later are covered as well.

// plain checks that every text in v has at most MaxHostText bytes and no control
// characters; the error names the first violation.
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

// shorten makes every text in what v points to satisfy plain.
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
		if t.CanSet() && s != t.String() { // shared text that fits is only read
			t.SetString(s)
		}
	}, nil)
}

// fill replaces every nil list and map in what v points to.
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
// every slice and map. Either may be nil.
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

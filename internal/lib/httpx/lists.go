package httpx

import (
	"encoding/json"
	"reflect"
	"strings"
	"sync"
)

// Lists returns v with every nil slice and map that encoding/json would write as
// null replaced by an empty one, so that clients need not check for null. Fields
// with omitempty stay omitted, and byte slices and types with their own
// MarshalJSON are unchanged. v is not modified: parts that must change are
// copied. If nothing must change, v itself is returned.
func Lists(v any) any {
	if v == nil {
		return nil
	}
	r := reflect.ValueOf(v)
	if !lacksList(r) {
		return v
	}
	return withLists(r).Interface()
}

var (
	marshaler = reflect.TypeFor[json.Marshaler]()
	holders   sync.Map // bool by reflect.Type: whether values of the type can contain a list
)

// opaque reports whether encoding/json does not encode the members of t itself,
// because t has its own encoding.
func opaque(t reflect.Type) bool {
	return t.Implements(marshaler) || reflect.PointerTo(t).Implements(marshaler)
}

// holdsLists reports whether a value of type t can contain a slice or a map.
func holdsLists(t reflect.Type) bool {
	if known, ok := holders.Load(t); ok {
		return known.(bool)
	}
	holds := findsLists(t, map[reflect.Type]bool{})
	holders.Store(t, holds)
	return holds
}

func findsLists(t reflect.Type, seen map[reflect.Type]bool) bool {
	if opaque(t) || seen[t] {
		return false
	}
	seen[t] = true
	switch t.Kind() {
	case reflect.Interface, reflect.Map:
		return true
	case reflect.Slice:
		return t.Elem().Kind() != reflect.Uint8
	case reflect.Pointer, reflect.Array:
		return findsLists(t.Elem(), seen)
	case reflect.Struct:
		for i := range t.NumField() {
			if encoded(t.Field(i)) && findsLists(t.Field(i).Type, seen) {
				return true
			}
		}
	}
	return false
}

// encoded reports whether encoding/json would write the field's empty list. It
// never writes unexported fields. A field with omitzero is left alone too,
// because an empty list is not zero and would appear.
func encoded(f reflect.StructField) bool {
	tag := f.Tag.Get("json")
	return (f.IsExported() || f.Anonymous) && tag != "-" && !strings.Contains(tag, ",omitzero")
}

// lacksList reports whether v contains a nil slice or map.
func lacksList(v reflect.Value) bool {
	if !holdsLists(v.Type()) {
		return false
	}
	switch v.Kind() {
	case reflect.Interface, reflect.Pointer:
		return !v.IsNil() && lacksList(v.Elem())
	case reflect.Slice, reflect.Array:
		if v.Kind() == reflect.Slice && v.IsNil() {
			return true
		}
		if !holdsLists(v.Type().Elem()) {
			return false
		}
		for i := range v.Len() {
			if lacksList(v.Index(i)) {
				return true
			}
		}
	case reflect.Map:
		if v.IsNil() {
			return true
		}
		if !holdsLists(v.Type().Elem()) {
			return false
		}
		for it := v.MapRange(); it.Next(); {
			if lacksList(it.Value()) {
				return true
			}
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if encoded(v.Type().Field(i)) && lacksList(v.Field(i)) {
				return true
			}
		}
	}
	return false
}

// withLists returns a copy of v without nil slices and maps. Parts that have
// none are shared with v.
func withLists(v reflect.Value) reflect.Value {
	out := reflect.New(v.Type()).Elem()
	out.Set(v)
	fillLists(out)
	return out
}

// fillLists does in place what withLists does to a copy. v must be a shallow
// copy; what it points to is not modified.
func fillLists(v reflect.Value) {
	if !lacksList(v) {
		return
	}
	switch v.Kind() {
	case reflect.Interface:
		v.Set(withLists(v.Elem()))
	case reflect.Pointer:
		to := reflect.New(v.Type().Elem())
		to.Elem().Set(v.Elem())
		fillLists(to.Elem())
		v.Set(to)
	case reflect.Slice:
		l := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
		reflect.Copy(l, v)
		for i := range l.Len() {
			fillLists(l.Index(i))
		}
		v.Set(l)
	case reflect.Array:
		for i := range v.Len() {
			fillLists(v.Index(i))
		}
	case reflect.Map:
		m := reflect.MakeMapWithSize(v.Type(), v.Len())
		for it := v.MapRange(); it.Next(); {
			m.SetMapIndex(it.Key(), withLists(it.Value()))
		}
		v.Set(m)
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Field(i); encoded(v.Type().Field(i)) && (f.CanSet() || f.Kind() == reflect.Struct) {
				fillLists(f)
			}
		}
	}
}

package settings

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"lull/internal/core/failure"
	"lull/internal/core/layers"
	"lull/internal/fleet/channel"
)

// Source is the origin of an effective setting.
type Source string

// The sources, strongest first.
const (
	FromFlag    Source = "flag"
	FromEnv     Source = "env"
	FromStored  Source = "stored"
	FromFile    Source = "file"
	FromDefault Source = "default"
)

// Layer contains the values of one source, by key.
type Layer struct {
	Source Source
	Values map[string]any
	lines  map[string]int
	name   string // name of the file
}

// Where returns where the layer sets f, for users: the variable, flag or line.
func (l Layer) Where(f Field) string {
	switch l.Source {
	case FromFlag:
		return "flag --" + strings.ReplaceAll(f.Key, "_", "-")
	case FromEnv:
		return "environment " + f.Env
	case FromFile:
		return fmt.Sprintf("file %s, line %d", l.name, l.lines[f.Key])
	}
	return string(l.Source)
}

// fault returns err with the place that sets f.
func (l Layer) fault(f Field, err error) error {
	detail := err.Error()
	if e, ok := errors.AsType[*failure.Invalid](err); ok && e.Field == f.Key {
		detail = e.Detail
	}
	switch l.Source {
	case FromFlag:
		return fmt.Errorf("cannot use --%s: %s", strings.ReplaceAll(f.Key, "_", "-"), detail)
	case FromEnv:
		return fmt.Errorf("cannot use %s: %s", f.Env, detail)
	case FromFile:
		return fmt.Errorf("cannot use %s in %s, line %d: %s", f.Key, l.name, l.lines[f.Key], detail)
	}
	return fmt.Errorf("cannot use %s: %w", l.Source, err)
}

// Setting is one effective value and its origin.
type Setting struct {
	Field
	Value  any    `json:"value"`
	Source Source `json:"source"`
}

// maxFile is the maximum size of a config file.
const maxFile = 1 << 20

// FileLayer parses a YAML config file. For a key that is no setting it calls other,
// which returns false if the key is unknown; a nil other knows none. Errors name file
// and line.
func FileLayer(name string, data []byte, other func(key string) bool) (Layer, error) {
	l := Layer{Source: FromFile, Values: map[string]any{}, lines: map[string]int{}, name: name}
	if len(data) > maxFile {
		return l, fmt.Errorf("cannot read %s: it has %d bytes, the limit is %d", name, len(data), maxFile)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return l, fmt.Errorf("cannot read %s: %w", name, err)
	}
	if len(doc.Content) == 0 {
		return l, nil
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		return l, fmt.Errorf("cannot read %s: line %d: it is not a mapping of settings", name, root.Line)
	}
	var errs []error
	for i := 0; i+1 < len(root.Content); i += 2 {
		key := root.Content[i]
		f, ok := FieldOf(key.Value)
		switch {
		case !ok && other != nil && other(key.Value):
			continue
		case !ok:
			errs = append(errs, fmt.Errorf("cannot use %.60s in %s, line %d: there is no such setting", key.Value, name, key.Line))
			continue
		case l.lines[f.Key] != 0:
			errs = append(errs, fmt.Errorf("cannot use %s in %s, line %d: it was set in line %d already", f.Key, name, key.Line, l.lines[f.Key]))
			continue
		}
		l.lines[f.Key] = key.Line
		var raw any
		err := root.Content[i+1].Decode(&raw)
		if err == nil {
			err = f.set(&Settings{}, raw)
		}
		if err != nil {
			errs = append(errs, l.fault(f, err))
			continue
		}
		l.Values[f.Key] = raw
	}
	return l, errors.Join(errs...)
}

// Resolve computes the effective settings from layers, strongest first. A setting
// that no layer has gets its default. The error joins every fault.
func Resolve(stack ...Layer) (Settings, []Setting, error) {
	var s Settings
	var errs []error
	all := make([]Setting, 0, len(fields))
	for _, l := range stack {
		for _, key := range slices.Sorted(maps.Keys(l.Values)) {
			if _, ok := FieldOf(key); !ok {
				errs = append(errs, fmt.Errorf("cannot use %s: there is no setting %.60q", l.Source, key))
			}
		}
	}
	for _, f := range fields {
		raw, from := layers.Strongest(stack, func(l *Layer) (any, bool) { v, ok := l.Values[f.Key]; return v, ok })
		if from == nil {
			raw, from = f.Default, &Layer{Source: FromDefault}
		}
		set := Setting{Field: f, Source: from.Source}
		if err := f.set(&s, raw); err != nil {
			errs = append(errs, from.fault(f, err))
		}
		set.Value = f.format(&s)
		all = append(all, set)
	}
	if len(errs) == 0 {
		errs = append(errs, s.Validate())
	}
	return s, all, errors.Join(errs...)
}

func containsString(list []string, s string) bool { return slices.Contains(list, s) }

func asInt(raw any) (int64, error) {
	switch v := raw.(type) {
	case int:
		return int64(v), nil
	case int64:
		return v, nil
	case float64:
		if v != float64(int64(v)) {
			return 0, errors.New("not whole")
		}
		return int64(v), nil
	case string:
		return strconv.ParseInt(strings.TrimSpace(v), 10, 64)
	}
	return 0, errors.New("not a number")
}

func asStrings(raw any) ([]string, error) {
	var out []string
	switch v := raw.(type) {
	case []string:
		out = v
	case []any:
		for _, e := range v {
			s, ok := e.(string)
			if !ok {
				return nil, errors.New("not a text")
			}
			out = append(out, s)
		}
	case string:
		if v = strings.TrimSpace(v); strings.HasPrefix(v, "[") {
			if err := json.Unmarshal([]byte(v), &out); err != nil {
				return nil, err
			}
			break
		}
		for e := range strings.SplitSeq(v, ",") {
			if e = strings.TrimSpace(e); e != "" {
				out = append(out, e)
			}
		}
	default:
		return nil, errors.New("not a list")
	}
	if len(out) > 200 {
		return nil, errors.New("too long")
	}
	for _, s := range out {
		if s == "" || len(s) > 100 {
			return nil, errors.New("a name is empty or has more than 100 bytes")
		}
	}
	return out, nil
}

// asRegions converts a mapping of regions or, as in the environment, JSON text.
func asRegions(raw any) (map[string]Region, error) {
	var m map[string]Region
	if err := asObject(raw, &m); err != nil {
		return nil, fmt.Errorf("not a mapping of regions: %v", err)
	}
	for name, r := range m {
		if r.Region == "" {
			r.Region = name
			m[name] = r
		}
	}
	return m, nil
}

// asChannels converts a mapping of channels or, as in the environment, JSON
// text.
func asChannels(raw any) (map[string]channel.Channel, error) {
	var m map[string]channel.Channel
	if err := asObject(raw, &m); err != nil {
		return nil, fmt.Errorf("not a mapping of channels: %v", err)
	}
	if len(m) > channel.Most {
		return nil, fmt.Errorf("it has %d channels, the limit is %d", len(m), channel.Most)
	}
	return m, nil
}

// asObject decodes a value from text, JSON or YAML, and rejects unknown fields.
func asObject(raw, into any) error {
	data, ok := []byte(nil), false
	if s, text := raw.(string); text {
		data, ok = []byte(s), true
	}
	if !ok {
		var err error
		if data, err = json.Marshal(raw); err != nil {
			return err
		}
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return err
	}
	if dec.More() {
		return errors.New("unexpected data after the value")
	}
	return nil
}

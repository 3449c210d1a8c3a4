package project

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/policy/when"
)

// shownProbe is a probe as written in a lull.yaml. Its fields mean the same as those
// of instance.Probe.
type shownProbe struct {
	Name           string   `yaml:"name,omitempty" json:"name,omitempty"`
	Kind           string   `yaml:"kind" json:"kind"`
	Command        []string `yaml:"command,omitempty,flow" json:"command,omitempty"`
	Inside         bool     `yaml:"inside,omitempty" json:"inside,omitempty"`
	URL            string   `yaml:"url,omitempty" json:"url,omitempty"`
	TokenFile      string   `yaml:"token_file,omitempty" json:"token_file,omitempty"`
	Address        string   `yaml:"address,omitempty" json:"address,omitempty"`
	Field          string   `yaml:"field,omitempty" json:"field,omitempty"`
	Metric         string   `yaml:"metric,omitempty" json:"metric,omitempty"`
	Query          string   `yaml:"query,omitempty" json:"query,omitempty"`
	Threshold      float64  `yaml:"threshold,omitempty" json:"threshold,omitempty"`
	Path           string   `yaml:"path,omitempty" json:"path,omitempty"`
	Window         string   `yaml:"window,omitempty" json:"window,omitempty"`
	MissingIsQuiet bool     `yaml:"missing_is_quiet,omitempty" json:"missing_is_quiet,omitempty"`
	Interval       string   `yaml:"interval,omitempty" json:"interval,omitempty"`
	Timeout        string   `yaml:"timeout,omitempty" json:"timeout,omitempty"`
}

func showProbes(probes []instance.Probe) (out []shownProbe) {
	for _, p := range probes {
		out = append(out, shownProbe{Name: p.Name, Kind: p.Kind, Command: p.Command, Inside: p.Inside, URL: p.URL, TokenFile: p.TokenFile, Address: p.Address, Field: p.Field, Metric: p.Metric,
			Query: p.Query, Threshold: p.Threshold, Path: p.Path, Window: span(p.Window), MissingIsQuiet: p.MissingIsQuiet,
			Interval: span(p.Interval), Timeout: span(p.Timeout)})
	}
	return out
}

// probes converts v, which is one probe in its short form, or a list of probes in
// short form or as mappings.
func (c *converter) probes(v any) (out []instance.Probe) {
	if _, one := v.(string); one {
		v = []any{v}
	}
	list, ok := v.([]any)
	if !ok {
		c.bad("probes", "want a list of probes")
		return nil
	}
	for n, v := range list {
		p, err := readProbe(v)
		if err != nil {
			c.bad(fmt.Sprintf("probes.%d", n), "%v", err)
			continue
		}
		out = append(out, p)
	}
	instance.NameProbes(out)
	return out
}

func readProbe(v any) (p instance.Probe, err error) {
	if text, ok := v.(string); ok {
		return instance.ParseProbe(text)
	}
	b, err := json.Marshal(v)
	if err != nil {
		return p, fmt.Errorf("want a string or a mapping: %w", err)
	}
	var in shownProbe
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&in); err != nil {
		if wrong := (*json.UnmarshalTypeError)(nil); errors.As(err, &wrong) {
			return p, fmt.Errorf("%s cannot be a %s", cmp.Or(wrong.Field, "a probe"), wrong.Value)
		}
		return p, fmt.Errorf("invalid probe: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	p = instance.Probe{Name: in.Name, Kind: in.Kind, Command: in.Command, Inside: in.Inside, URL: in.URL, TokenFile: in.TokenFile, Address: in.Address, Field: in.Field, Metric: in.Metric,
		Query: in.Query, Threshold: in.Threshold, Path: in.Path, MissingIsQuiet: in.MissingIsQuiet}
	for _, s := range []struct {
		field, text string
		to          *idle.Duration
	}{{"window", in.Window, &p.Window}, {"interval", in.Interval, &p.Interval}, {"timeout", in.Timeout, &p.Timeout}} {
		if s.text == "" {
			continue
		}
		var d time.Duration
		if d, err = when.Span(s.text); err != nil {
			return p, fmt.Errorf("%s: %w", s.field, err)
		}
		*s.to = idle.Duration(d)
	}
	return p, nil
}

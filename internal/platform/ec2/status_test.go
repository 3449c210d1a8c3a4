package ec2

import (
	"encoding/xml"
	"strings"
	"testing"
)

// slowly reads the states with encoding/xml, as a reference for readStates.
func slowly(body []byte) ([]idState, error) {
	var v struct {
		Set []struct {
			Items []struct {
				ID    []string `xml:"instanceId"`
				State []struct {
					Name []string `xml:"name"`
				} `xml:"instanceState"`
			} `xml:"item"`
		} `xml:"instanceStatusSet"`
	}
	if err := xml.Unmarshal(body, &v); err != nil {
		return nil, err
	}
	var out []idState
	for _, s := range v.Set {
		for _, i := range s.Items {
			var one idState
			for _, id := range i.ID {
				one.id = id
			}
			for _, s := range i.State {
				for _, n := range s.Name {
					one.state = n
				}
			}
			out = append(out, one)
		}
	}
	return out, nil
}

const (
	plainItem = `<item><instanceId>i-0000000000000000a</instanceId><availabilityZone>a</availabilityZone><instanceState><code>16</code><name>running</name></instanceState>
  <systemStatus><status>ok</status><details><item><name>reachability</name><status>passed</status></item></details></systemStatus></item>`
	plainAnswer = `<?xml version="1.0" encoding="UTF-8"?>
<DescribeInstanceStatusResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId><instanceStatusSet>` + plainItem + `
<item><instanceState><name>stopped</name></instanceState><instanceId>i-0000000000000000b</instanceId></item></instanceStatusSet><nextToken>n&amp;t</nextToken></DescribeInstanceStatusResponse>`
)

func TestReadStates(t *testing.T) {
	states, rest, ok := readStates([]byte(plainAnswer))
	if !ok || len(states) != 2 || states[0] != (idState{"i-0000000000000000a", "running"}) || states[1] != (idState{"i-0000000000000000b", "stopped"}) {
		t.Fatalf("read %v %v", states, ok)
	}
	if !strings.Contains(string(rest), "<instanceStatusSet></instanceStatusSet><nextToken>n&amp;t</nextToken></DescribeInstanceStatusResponse>") {
		t.Errorf("left %s", rest)
	}
	for name, change := range map[string][2]string{
		"an attribute":         {"<instanceId>i-0000000000000000a", `<instanceId x="1">i-0000000000000000a`},
		"a comment":            {"<availabilityZone>", "<!-- <item> --><availabilityZone>"},
		"a comment outside":    {"<requestId>", "<!-- <instanceStatusSet> --><requestId>"},
		"a reference":          {"i-0000000000000000a<", "i-000000000000000&#48;a<"},
		"no id":                {"<instanceId>i-0000000000000000b</instanceId>", ""},
		"an empty state":       {"<name>stopped</name>", "<name></name>"},
		"a wrong end":          {"</code>", "</kode>"},
		"text between":         {"\n<item>", "x<item>"},
		"another element":      {"\n<item>", "<note></note><item>"},
		"no list":              {"instanceStatusSet>", "list>"},
		"a cut":                {"</instanceStatusSet>", ""},
		"an unclosed instance": {"</systemStatus></item>", "</systemStatus>"},
	} {
		body := strings.ReplaceAll(plainAnswer, change[0], change[1])
		if body == plainAnswer {
			t.Fatalf("%s: nothing was changed", name)
		}
		if states, _, ok := readStates([]byte(body)); ok {
			t.Errorf("%s: read %v", name, states)
		}
	}
}

// FuzzReadStates compares readStates with encoding/xml: if both can read an
// answer, the states must be equal.
func FuzzReadStates(f *testing.F) {
	f.Add([]byte(plainAnswer))
	f.Add([]byte(`<a><instanceStatusSet></instanceStatusSet></a>`))
	f.Add([]byte(`<a><instanceStatusSet>` + plainItem + `</instanceStatusSet><instanceStatusSet>` + plainItem + `</instanceStatusSet></a>`))
	f.Add([]byte(`<a><instanceStatusSet><item><instanceId>a<b></b>c</instanceId><instanceState><name>n</name></instanceState></item></instanceStatusSet></a>`))
	f.Add([]byte(`<a b="<instanceStatusSet>"><instanceStatusSet></instanceStatusSet></a>`))
	f.Fuzz(func(t *testing.T, body []byte) {
		states, rest, ok := readStates(body)
		if !ok {
			return
		}
		if len(rest) > len(body) {
			t.Fatalf("%d bytes are left of %d", len(rest), len(body))
		}
		want, err := slowly(body)
		if err != nil {
			return
		}
		if len(want) != len(states) {
			t.Fatalf("read %v, want %v", states, want)
		}
		for i := range want {
			if want[i] != states[i] {
				t.Fatalf("read %v, want %v", states, want)
			}
		}
	})
}

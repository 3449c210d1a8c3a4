package wire

import (
	"encoding/xml"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
)

func TestFormLists(t *testing.T) {
	f, err := Parse("Id.1=a&Id.2=b&Id.4=d&Filter.1.Name=n&Filter.1.Value.1=x&Filter.2.Name=m&Filter.4.Name=q&N=12&B=true&X=z")
	if err != nil {
		t.Fatal(err)
	}
	if got := f.List("Id"); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("List: %v", got)
	}
	if got := f.Groups("Filter"); !slices.Equal(got, []string{"Filter.1.", "Filter.2."}) {
		t.Errorf("Groups: %v", got)
	}
	if n, err := f.Int("N", 0); n != 12 || err != nil {
		t.Errorf("Int: %d, %v", n, err)
	}
	if _, err := f.Int("X", 0); err == nil || !strings.Contains(err.Error(), "X") {
		t.Errorf("Int of a word: %v", err)
	}
	if b, err := f.Bool("B"); !b || err != nil {
		t.Errorf("Bool: %v, %v", b, err)
	}
	if _, err := f.Bool("X"); err == nil || !strings.Contains(err.Error(), "X") {
		t.Errorf("Bool of a word: %v", err)
	}
	if _, err := Parse(strings.Repeat("a=b&", maxParams+1)); err == nil {
		t.Error("too many parameters are taken")
	}
}

func TestCaller(t *testing.T) {
	r := httptest.NewRequest("POST", "/", nil)
	r.Header.Set("Authorization", "AWS4-HMAC-SHA256 Credential=AKIA1/20260101/eu-west-1/ec2/aws4_request, SignedHeaders=host, Signature=00")
	r.Header.Set("X-Amz-Security-Token", "tok")
	if c := CallerOf(r); c != (Caller{"AKIA1", "tok", "eu-west-1", "ec2"}) {
		t.Errorf("%+v", c)
	}
	for _, bad := range []string{"", "Basic x", "AWS4-HMAC-SHA256 ", "AWS4-HMAC-SHA256 Credential=a/b"} {
		r.Header.Set("Authorization", bad)
		if c := CallerOf(r); c.Key != "" {
			t.Errorf("%q: %+v", bad, c)
		}
	}
}

func FuzzForm(f *testing.F) {
	for _, s := range []string{"", "Action=X&Id.1=a", "Filter.1.Name=n&Filter.1.Value.1=", "%zz", "a=b;c=d", "Id.99999999999999999999=a", "Filter.-1.x=y&Filter.1.=1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		form, err := Parse(s)
		if err != nil {
			return
		}
		for _, g := range form.Groups("Filter") {
			if len(form.List(g+"Value")) > maxIndex {
				t.Error("a list is longer than its bound")
			}
		}
		form.List("Id")
		if _, err := form.Int("Id.1", 0); err == nil && form.Has("Id.1") && len(form.Get("Id.1")) > 30 {
			t.Errorf("%q is no number", form.Get("Id.1"))
		}
	})
}

// FuzzXML checks that a document with any tag value is well-formed, and that text
// that XML can represent is read back unchanged.
func FuzzXML(f *testing.F) {
	for _, s := range []string{"", "plain", "<&>\"'", "\x00\x01", "\xff\xfe", "a\r\nb\t", "\ufffd", "\ufffe", "日本"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		var x XML
		x.In("r", func() { x.Text("v", s) })
		var got struct {
			V string `xml:"v"`
		}
		if err := xml.Unmarshal(x.Bytes(), &got); err != nil {
			t.Fatalf("%q: %v", x.Bytes(), err)
		}
		clean := strings.ToValidUTF8(s, "\ufffd") == s && !strings.ContainsFunc(s, func(r rune) bool {
			return r < 0x20 && r != '\t' && r != '\n' && r != '\r' || r == 0xfffe || r == 0xffff
		})
		if clean && got.V != s {
			t.Errorf("%q came back as %q", s, got.V)
		}
	})
}

package term

import "testing"

func TestFold(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"one two three\nfour\n\n  kept   as it is, however long it may be\nfive", "one two\nthree four\n\n  kept   as it is, however long it may be\nfive\n"},
		{"- an item that is kept\n--all is text", "- an item that is kept\n--all is\ntext\n"},
		{"anunbreakableword x", "anunbreakableword\nx\n"},
	} {
		if got := fold(c.in, 10); got != c.want {
			t.Errorf("fold(%q) = %q, want %q", c.in, got, c.want)
		}
	}
	if got, want := folded("  --x  ", "a,list,of,words in it", 14), "  --x  a,list,\n       of,\n       words\n       in it\n"; got != want {
		t.Errorf("folded = %q, want %q", got, want)
	}
}

func TestContinued(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"  lull run -- sh", "  lull run -- sh"},
		{"  lull run --name web -- sh", "  lull run --name \\\n      web -- sh"},
		{`  lull run 'a b c d e f g h i j'`, "  lull run \\\n      'a b c d e f g h i j'"},
		{"      unbreakable-in-twenty", "      unbreakable-in-twenty"},
	} {
		if got := continued(c.in, 20); got != c.want {
			t.Errorf("continued(%q) = %q, want %q", c.in, got, c.want)
		}
	}
}

package access_test

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/server/access"
	"lull/internal/store"
	"lull/internal/store/mem"
)

func nothingElse(access.Token) ([]store.Op, error) { return nil, nil }

// TestLink checks that a link opens one session, and that the session ends with the
// link's token.
func TestLink(t *testing.T) {
	tokens := open(t, mem.New(mem.Options{}))
	of, _, err := tokens.Create(t.Context(), access.Wanted{Name: "ada", Role: access.Operator, By: "test"})
	if err != nil {
		t.Fatal(err)
	}
	link, err := tokens.Link(t.Context(), of.ID, time.Minute)
	errtest.None(t, err)
	session, secret, err := tokens.SignIn(t.Context(), time.Now(), link, nothingElse)
	if err != nil || session.Role != access.Operator || session.Parent != of.ID || session.ExpiresAt == nil {
		t.Fatalf("%+v, %v", session, err)
	}
	if got, err := tokens.Check(time.Now(), secret); err != nil || got.ID != session.ID {
		t.Errorf("the session: %+v, %v", got, err)
	}
	if _, err := tokens.Check(time.Now().Add(access.SessionTTL), secret); !errors.Is(err, access.ErrDenied) {
		t.Errorf("after its time the session is let in: %v", err)
	}
	if _, _, err := tokens.SignIn(t.Context(), time.Now(), link, nothingElse); !errors.Is(err, access.ErrLinkUsed) {
		t.Errorf("a second use: %v", err)
	}
	errtest.Get(tokens.Revoke(t.Context(), of.ID, "test"))(t)
	if _, err := tokens.Check(time.Now(), secret); !errors.Is(err, access.ErrDenied) {
		t.Errorf("the session outlives its token: %v", err)
	}
}

// TestLinkRefused checks that an invalid link neither opens a session nor uses a
// valid link up.
func TestLinkRefused(t *testing.T) {
	db := mem.New(mem.Options{})
	tokens := open(t, db)
	first, err := tokens.First(t.Context())
	errtest.None(t, err)
	id := access.ID(first)
	if got, err := tokens.FirstID(t.Context()); err != nil || got != id {
		t.Errorf("the first token is %q, %v; want %q", got, err, id)
	}
	agent, _, err := tokens.Create(t.Context(), access.Wanted{Name: "a", Role: access.Agent, Machine: "m", By: "test"})
	if err != nil {
		t.Fatal(err)
	}
	for name, of := range map[string]string{"unknown": "0123456789", "a machine's": agent.ID} {
		if _, err := tokens.Link(t.Context(), of, time.Minute); !errors.Is(err, access.ErrLinkUnknown) {
			t.Errorf("a link for a token that is %s: %v", name, err)
		}
	}
	replaced, err := tokens.Link(t.Context(), id, time.Minute)
	errtest.None(t, err)
	link, err := tokens.Link(t.Context(), id, time.Minute)
	errtest.None(t, err)
	other := "A"
	if strings.HasSuffix(link, other) {
		other = "B"
	}
	for name, c := range map[string]struct {
		link string
		at   time.Duration
		want error
	}{
		"empty":         {"", 0, access.ErrLinkUnknown},
		"a path":        {"../../born_" + strings.Repeat("A", 26), 0, access.ErrLinkUnknown},
		"wrong":         {link[:len(link)-1] + other, 0, access.ErrLinkUnknown},
		"of no user":    {"0123456789" + link[10:], 0, access.ErrLinkUnknown},
		"the token":     {first, 0, access.ErrLinkUnknown},
		"replaced":      {replaced, 0, access.ErrLinkUnknown},
		"expired":       {link, time.Minute, access.ErrLinkExpired},
		"wrong, so old": {link[:len(link)-1] + other, time.Hour, access.ErrLinkUnknown},
	} {
		if _, secret, err := tokens.SignIn(t.Context(), time.Now().Add(c.at), c.link, nothingElse); !errors.Is(err, c.want) || secret != "" {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if n := len(tokens.List()); n != 2 {
		t.Errorf("%d tokens, want the two that were made", n)
	}
	kept, err := db.Client().Range(t.Context(), store.Query{Keys: store.Prefix("")})
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range kept.Values {
		if strings.Contains(string(v.Data), link[11:]) {
			t.Errorf("%s has the link in the clear", v.Key)
		}
	}
	if _, _, err := tokens.SignIn(t.Context(), time.Now(), link, nothingElse); err != nil {
		t.Errorf("the link was spent: %v", err)
	}
}

// TestLinkRace checks that exactly one of many concurrent uses of a link, on two
// servers, succeeds.
func TestLinkRace(t *testing.T) {
	db := mem.New(mem.Options{})
	a, b := open(t, db), open(t, db)
	first, err := a.First(t.Context())
	errtest.None(t, err)
	link, err := a.Link(t.Context(), access.ID(first), time.Minute)
	errtest.None(t, err)
	var all sync.WaitGroup
	let := make(chan bool, 16)
	for n := range cap(let) {
		all.Go(func() {
			_, _, err := []*access.Tokens{a, b}[n%2].SignIn(t.Context(), time.Now(), link, nothingElse)
			if err != nil && !errors.Is(err, access.ErrLinkUsed) {
				t.Error(err)
			}
			let <- err == nil
		})
	}
	all.Wait()
	close(let)
	n := 0
	for in := range let {
		if in {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d sessions were opened, want 1", n)
	}
}

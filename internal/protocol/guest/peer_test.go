package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestPeers checks that both ends can call each other, that refusals keep their
// code, and that pending calls fail when the channel ends.
func TestPeers(t *testing.T) {
	x, y := net.Pipe()
	a, b := NewPeer(x), NewPeer(y)
	stuck := make(chan struct{})
	var run sync.WaitGroup
	run.Go(func() { _ = a.Run(nil, func(q Request) (any, error) { return nil, errors.New("not here") }) })
	run.Go(func() {
		_ = b.Run(nil, func(q Request) (any, error) {
			switch q.Method {
			case "stuck":
				<-stuck
			case "back":
				return nil, b.Call(t.Context(), "x", nil, nil)
			}
			return HelloAnswer{Version: 7}, nil
		})
	})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var h HelloAnswer
	if err := a.Call(ctx, Hello, nil, &h); err != nil || h.Version != 7 {
		t.Errorf("%+v, %v", h, err)
	}
	var refused *Error
	if err := a.Call(ctx, "back", nil, nil); !errors.As(err, &refused) || refused.Code != Refused || refused.Message != "not here" {
		t.Errorf("refusal: %v", err)
	}
	if err := a.Call(ctx, Log, LogNote{Data: make([]byte, MaxLine)}, nil); err == nil {
		t.Error("a message of more than a line was sent")
	}
	waits := make(chan error, 1)
	run.Go(func() { waits <- a.Call(ctx, "stuck", nil, nil) })
	if err := a.Call(ctx, Hello, nil, &h); err != nil { // a waiting call does not block others
		t.Error(err)
	}
	x.Close()
	if err := <-waits; err == nil {
		t.Error("a call outlived its channel")
	}
	close(stuck)
	y.Close()
	run.Wait()
	if err := a.Call(ctx, Hello, nil, nil); !errors.Is(err, ErrChannelEnded) {
		t.Errorf("a call on a channel that ended: %v", err)
	}
}

// FuzzPeer sends random lines as a guest. Each must be either dropped or handled.
func FuzzPeer(f *testing.F) {
	f.Add([]byte(`{"jsonrpc":"2.0","method":"log","params":{"data":"aGk="}}`))
	f.Add([]byte(`{"jsonrpc":"2.0","id":5,"result":{}}`))
	f.Add([]byte("{\n\x00{}\nnull"))
	f.Fuzz(func(t *testing.T, b []byte) {
		p := NewPeer(&pipe{Reader: bytes.NewReader(b)})
		_ = p.Run(nil, func(q Request) (any, error) {
			if q.Method == "" {
				return nil, fmt.Errorf("no method")
			}
			_, _ = q.Message()
			return nil, nil
		})
	})
}

// TestEveryLineCounts checks that the function that limits the input sees every
// line, even a meaningless one, and can end the channel.
func TestEveryLineCounts(t *testing.T) {
	var told []int
	enough := errors.New("enough")
	p := NewPeer(&pipe{Reader: strings.NewReader("\n\n{}\nnot json at all\n\n\n")})
	err := p.Run(func(bytes int) error {
		if told = append(told, bytes); len(told) == 5 {
			return enough
		}
		return nil
	}, nil)
	if want := []int{1, 1, 3, 16, 1}; !errors.Is(err, enough) || !slices.Equal(told, want) {
		t.Errorf("received %v and %v, want %v", told, err, want)
	}
}

package simtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/ec2"

	"lull/internal/lib/errtest"
	"lull/internal/lib/memnet"
	"lull/internal/sim"
	"lull/internal/sim/world"
)

// cml is a minimal CML client.
type cml struct {
	http   *http.Client
	tokens map[string]string
}

func (c *cml) call(method, host, path, body string, into any) (int, error) {
	r, err := http.NewRequest(method, "http://"+host+"/api/v0/"+path, strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	r.Header.Set("Authorization", "Bearer "+c.tokens[host])
	resp, err := c.http.Do(r)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return resp.StatusCode, nil
	}
	return resp.StatusCode, json.NewDecoder(resp.Body).Decode(into)
}

// newest returns the time of the newest user action in a host's telemetry.
func (c *cml) newest(host string) (at time.Time, err error) {
	var events []struct {
		Category  string
		Timestamp time.Time
		Data      struct {
			User string `json:"user_id"`
		}
	}
	status, err := c.call("GET", host, "telemetry/events", "", &events)
	if err == nil && status == http.StatusUnauthorized {
		var token string
		if _, err := c.call("POST", host, "authenticate", `{"username":"admin","password":"cml"}`, &token); err != nil {
			return at, err
		}
		c.tokens[host] = token
		status, err = c.call("GET", host, "telemetry/events", "", &events)
	}
	if err != nil || status != http.StatusOK {
		return at, errors.Join(err, fmt.Errorf("status %d", status))
	}
	for _, e := range events {
		if e.Data.User != "" && e.Data.User != world.AdminID && e.Timestamp.After(at) {
			at = e.Timestamp
		}
	}
	return at, nil
}

// TestSimulatedWeek runs a week of a dozen workers and their users in a bubble. A
// naive controller reads states with the SDK, reads the telemetry every half hour,
// and stops what has been quiet for two hours. At each read, the telemetry must agree
// with what the users really did.
func TestSimulatedWeek(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	synctest.Test(t, func(t *testing.T) {
		c, err := sim.Default()
		errtest.None(t, err)
		c.Seed = seed
		c.Start = time.Date(2026, 3, 2, 6, 0, 0, 0, time.UTC)
		for name, p := range c.Profiles {
			p.Spoil, p.ClockOffset, p.History = world.Spoil{}, 0, 0
			c.Profiles[name] = p
		}
		s, err := sim.New(sim.Options{Scenario: c})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var network memnet.Network
		l, err := network.Listen(":80") // on every address: the Host header selects the service
		errtest.None(t, err)
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx, sim.Listeners{API: l}) }()
		tr := &http.Transport{DialContext: network.DialContext}
		w := &week{t: t, s: s, cml: cml{&http.Client{Transport: tr}, map[string]string{}}, quiet: map[string]time.Time{}}
		w.ec2 = ec2.New(ec2.Options{
			Region: region, BaseEndpoint: aws.String("http://sim"), HTTPClient: whole{&http.Client{Transport: tr}},
			Credentials: credentials.NewStaticCredentialsProvider("AKIASIM", "x", ""),
		})
		for range 7 * 48 {
			w.cycle(ctx)
			time.Sleep(30 * time.Minute)
		}
		tr.CloseIdleConnections()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		t.Logf("stopped %d times; users started %d, were interrupted %d times; %d reads of telemetry; calls %v",
			w.stops, w.starts(), w.interruptions(), w.looks, s.World.Calls.All())
		if w.stops < 5 || w.looks < 100 || w.starts() < 1 {
			t.Errorf("little happened in a week: %d stops, %d looks, %d starts", w.stops, w.looks, w.starts())
		}
	})
}

type week struct {
	t            *testing.T
	s            *sim.Server
	ec2          *ec2.Client
	cml          cml
	quiet        map[string]time.Time
	stops, looks int
}

func (w *week) cycle(ctx context.Context) {
	p := ec2.NewDescribeInstanceStatusPaginator(w.ec2, &ec2.DescribeInstanceStatusInput{MaxResults: aws.Int32(5)})
	for p.HasMorePages() {
		out, err := p.NextPage(ctx)
		if err != nil {
			w.t.Fatal(err)
		}
		for _, st := range out.InstanceStatuses {
			w.check(ctx, *st.InstanceId)
		}
	}
}

func (w *week) check(ctx context.Context, id string) {
	var truth time.Time
	ready := false
	w.s.World.HostAt(id, func(h *world.Host, _ world.Moment, r world.Reach) {
		truth, ready = h.LastActivity, r == world.Ready && h.OptIn
	})
	if !ready {
		return
	}
	at, err := w.cml.newest(id)
	if err != nil {
		w.t.Errorf("%s: %v", id, err)
		return
	}
	w.looks++
	if at.UnixMilli() != truth.UnixMilli() && !truth.IsZero() {
		w.t.Errorf("%s: telemetry says %s, the users %s", id, at, truth)
	}
	if time.Since(at) < 2*time.Hour {
		w.quiet[id] = time.Time{}
		return
	}
	if w.quiet[id].IsZero() {
		w.quiet[id] = time.Now()
	}
	if time.Since(w.quiet[id]) >= time.Hour {
		delete(w.quiet, id)
		if _, err := w.ec2.StopInstances(ctx, &ec2.StopInstancesInput{InstanceIds: []string{id}}); err == nil {
			w.stops++
		} else if code(err) != "OperationNotPermitted" {
			w.t.Errorf("%s: %v", id, err)
		}
	}
}

func (w *week) starts() (n int) {
	w.s.World.All(func(i *world.Instance, _ world.Moment) {
		for _, h := range i.History {
			if h.By == "user" && h.To == world.Pending {
				n++
			}
		}
	})
	return n
}

func (w *week) interruptions() (n int) {
	w.s.World.All(func(i *world.Instance, _ world.Moment) {
		if i.Host != nil {
			n += i.Host.Interruptions
		}
	})
	return n
}

package server

import (
	"context"
	"net/http"

	"lull/internal/fleet/audit"
	"lull/internal/fleet/channel"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
)

// Notifier tests notification channels.
type Notifier interface {
	// Test sends a made-up event to a channel and returns the outcome.
	Test(ctx context.Context, by audit.Actor, channel string) error
}

type NamedChannel struct {
	Channel string `path:"channel" maxLength:"128" doc:"Name of a channel of NOTIFY_CHANNELS"`
}

type NamedLetter struct {
	NamedChannel
	Letter string `path:"letter" maxLength:"128" doc:"Id of a dead letter"`
}

func (s *Server) notifyRoutes() {
	all := base + "/notifications"
	register(s, route{id: "list-channels", method: "GET", path: all + "/channels", role: access.Viewer, doc: "Notification channels and the position of each"},
		func(ctx context.Context, in *Paged) (*answer[control.List[channel.Delivery]], error) {
			l, err := s.fleet.Deliveries(ctx)
			return ok(pageOf(l, in, func(d channel.Delivery) string { return d.Channel }), err)
		})
	register(s, route{id: "test-channel", method: "POST", path: all + "/channels/{channel}/test", role: access.Operator, status: http.StatusNoContent, doc: "Send a test notification to a channel and return the result"},
		func(ctx context.Context, in *NamedChannel) (*struct{}, error) {
			if s.notifier == nil {
				return nil, fault(http.StatusConflict, "no_notifier", "cannot do that here: this process delivers no notifications")
			}
			return nil, problem(s.notifier.Test(ctx, actor(ctx), in.Channel))
		})
	register(s, route{id: "list-dead-letters", method: "GET", path: all + "/dead", role: access.Viewer, doc: "Events that could not be delivered, by channel and oldest first"},
		func(ctx context.Context, in *Paged) (*answer[control.List[channel.DeadLetter]], error) {
			l, err := s.fleet.DeadLetters(ctx)
			return ok(pageOf(l, in, func(d channel.DeadLetter) string { return d.Channel + "/" + d.ID }), err)
		})
	one := all + "/dead/{channel}/{letter}"
	register(s, route{id: "retry-dead-letter", method: "POST", path: one + "/retry", role: access.Operator, status: http.StatusAccepted, doc: "Retry a dead letter; it is removed from the list once delivered"},
		func(ctx context.Context, in *NamedLetter) (*answer[channel.DeadLetter], error) {
			d, err := s.fleet.RetryDead(ctx, actor(ctx), in.Channel, in.Letter)
			a, err := ok(d, err)
			if err == nil {
				a.Status = http.StatusAccepted
			}
			return a, err
		})
	register(s, route{id: "drop-dead-letter", method: "DELETE", path: one, role: access.Operator, doc: "Delete a dead letter permanently"},
		func(ctx context.Context, in *NamedLetter) (*struct{}, error) {
			return nil, problem(s.fleet.DropDead(ctx, actor(ctx), in.Channel, in.Letter))
		})
}

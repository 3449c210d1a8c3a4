package server

import (
	"context"
	"time"

	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/server/board"
)

// overviewWithin limits how long an overview waits for the store.
const overviewWithin = 10 * time.Second

func (s *Server) overviewRoutes() {
	register(s, route{id: "overview", method: "GET", path: base + "/overview", role: access.Viewer,
		doc: "The fleet at a glance: counts by standing, what needs attention first, and a window of the workers"},
		func(ctx context.Context, in *struct {
			Search   string `query:"q" maxLength:"256" doc:"Words that must all be in a worker's name, id, owner, template, addresses or tags"`
			Region   string `query:"aws_region" maxLength:"32"`
			Standing string `query:"standing" enum:"active,idle,pausing_soon,blocked,unknown,checking,paused,starting,failed"`
			Sort     string `query:"sort" enum:"name,idle,pause,attention,standing,activity,owner,region,type,template,cpu,cost" default:"name" doc:"idle: longest first; pause: soonest first; activity: newest first; cpu and cost: highest first"`
			Reverse  bool   `query:"reverse" doc:"The opposite order; rows without a value stay last"`
			Offset   int    `query:"offset" minimum:"0" maximum:"1000000"`
			Limit    int    `query:"limit" minimum:"0" maximum:"500" default:"100"`
		}) (*answer[control.Overview], error) {
			ctx, cancel := context.WithTimeout(ctx, overviewWithin)
			defer cancel()
			out, err := s.board.Overview(ctx, board.Query{Search: in.Search, Region: in.Region, Standing: control.Standing(in.Standing),
				Sort: in.Sort, Reverse: in.Reverse, Offset: in.Offset, Limit: in.Limit}, time.Now())
			out.Halt = s.fleet.Halted()
			return ok(out, err)
		})
}

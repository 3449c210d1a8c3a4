package agent

import (
	"context"
	"fmt"

	"lull/internal/protocol/agentctl"
)

// identify looks up the machine's instance, outside the loop, until it is known. The
// metadata service may start after the agent.
func (a *Agent) identify() {
	if a.o.Identify == nil || a.self.Load().instanceID != "" {
		return
	}
	a.once("identity", func(ctx context.Context) func() {
		id, region, err := a.o.Identify(ctx)
		return func() {
			a.self.Store(&identity{instanceID: id, region: region, err: err})
			a.alarmIf(err != nil, "instance_unknown", fmt.Sprintf("The identity of this machine's instance is not known yet: %v.", err))
			if err == nil {
				a.log.Info("this is an EC2 instance", "instance_id", id, "region", region)
				a.refresh(func(agentctl.Reload) { a.soon(a.now()) })
			}
		}
	})
}

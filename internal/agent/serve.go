package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"strconv"

	"lull/internal/lib/httpx"
	"lull/internal/lib/unixsock"
	"lull/internal/protocol/agentctl"
)

// Group is the group whose members may use the agent's socket besides root.
const Group = "lull"

// Listen creates the control socket, accessible to root and, if it exists, to
// the group.
func Listen(path string) (net.Listener, error) {
	l, err := unixsock.Listen(path, 0o600)
	if err != nil {
		return nil, err
	}
	g, err := user.LookupGroup(Group)
	if err != nil {
		return l, nil
	}
	gid, err := strconv.Atoi(g.Gid)
	if err == nil {
		// Change the group first, so that the mode never opens the socket to another
		// group.
		if err = os.Chown(path, -1, gid); err == nil {
			err = os.Chmod(path, 0o660)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cannot open the control socket to group %s: %w", Group, err), l.Close())
	}
	return l, nil
}

// Control serves a on its control socket.
func Control(a agentctl.Agent, l net.Listener, log *slog.Logger) *httpx.Server {
	return &httpx.Server{Name: "agent control socket", Listener: l, Log: log, Handler: named(agentctl.Handler(a))}
}

// named adds the caller's identity to a request: the user of the process at the other
// end of the socket.
func named(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next.ServeHTTP(w, r.WithContext(agentctl.WithCaller(r.Context(), httpx.UserOf(r.Context()))))
	})
}

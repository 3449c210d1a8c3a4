# The server's user and the agent's group. No unit is enabled.
if command -v systemd-sysusers >/dev/null; then systemd-sysusers lull.conf; fi

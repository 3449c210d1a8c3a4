#!/bin/sh
# Makes the group and the server's user. No unit is enabled; running ones are
# restarted.
set -e
if command -v systemd-sysusers >/dev/null; then
	systemd-sysusers lull.conf
elif command -v groupadd >/dev/null; then
	getent group lull >/dev/null || groupadd -r lull
	getent passwd lull-server >/dev/null || useradd -r -M -U -d /var/lib/lull/server -s /sbin/nologin lull-server
else # busybox
	grep -q ^lull: /etc/group || addgroup -S lull
	grep -q ^lull-server: /etc/group || addgroup -S lull-server
	grep -q ^lull-server: /etc/passwd || adduser -S -D -H -h /var/lib/lull/server -s /sbin/nologin -G lull-server lull-server
fi
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
	systemctl try-restart lull-agent.service lull-host.service lull-server.service
fi

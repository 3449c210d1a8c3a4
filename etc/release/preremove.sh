#!/bin/sh
# Stops what runs. An upgrade by rpm, which calls this with 1, leaves it alone.
set -e
if [ "${1:-0}" != 1 ] && [ -d /run/systemd/system ]; then
	systemctl disable --now lull-agent.service lull-host.service lull-server.service
	rm -rf /run/systemd/system/*.service.d/zz-lull.conf /var/lib/lull-handoff
	systemctl daemon-reload
fi

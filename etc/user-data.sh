#!/bin/bash
# EC2 user data: install the agent at the first boot. Set the address of the
# Debian package and its SHA-256 here, above the checks; the policy comes from
# the instance's tags. A machine that lull server launches needs none of this:
# its template has "agent: true".
# The instance needs a profile with the rights that "lull agent iam" prints.
set -euo pipefail
: "${LULL_DEB_URL:?set it to the address of the Debian package lull-agent}"
: "${LULL_DEB_SHA256:?set it to the SHA-256 of the Debian package}"

deb=$(mktemp /root/lull-XXXXXX.deb)
trap 'rm -f "$deb"' EXIT
for _ in 1 2 3 4 5; do
	if command -v curl >/dev/null; then
		curl -fsSL --max-time 120 -o "$deb" "$LULL_DEB_URL" && break
	else
		wget -q -T 120 -O "$deb" "$LULL_DEB_URL" && break
	fi
	sleep 10
done
echo "$LULL_DEB_SHA256  $deb" | sha256sum --check --quiet
dpkg --install "$deb"
systemctl enable --now lull-agent.service
lull-agent doctor || true

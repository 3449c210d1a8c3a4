#!/bin/sh
# Fetches Debian's cloud kernel and unpacks it into a directory, without
# installing it: DIR/boot/vmlinuz-VERSION and DIR/lib/modules/VERSION.
#
#   guest-kernel.sh DIR
set -eu

if [ $# -ne 1 ]; then
	echo "usage: guest-kernel.sh DIR" >&2
	exit 2
fi
for tool in apt-cache apt-get dpkg; do
	command -v "$tool" >/dev/null || { echo "cannot fetch a guest kernel: $tool is missing (this needs Debian)" >&2; exit 1; }
done
mkdir -p "$1"
dir=$(cd "$1" && pwd)
if ls "$dir"/boot/vmlinuz-* >/dev/null 2>&1; then
	exit 0
fi

# The version moves, so its name is looked up.
name() {
	apt-cache depends linux-image-cloud-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-[0-9][^ ]*\).*/\1/p' | head -n 1
}
package=$(name)
if [ -z "$package" ] && [ "$(id -u)" = 0 ]; then
	apt-get -qq update
	package=$(name)
fi
if [ -z "$package" ]; then
	echo "cannot fetch a guest kernel: apt knows no linux-image-cloud-amd64 (run apt-get update)" >&2
	exit 1
fi
work=$(mktemp -d "$dir/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
(cd "$work" && for try in 1 2 3; do
	apt-get -qq -o APT::Sandbox::User=root -o Acquire::Retries=3 download "$package" && break
	# What the lists name may have been replaced by a newer one.
	[ "$try" != 3 ] && [ "$(id -u)" = 0 ] && apt-get -qq update || exit 1
done)
dpkg -x "$work"/*.deb "$work/tree"
# Only what a guest uses: the kernel, its configuration and its modules. The
# kernel comes last, because a later run checks for it.
mkdir -p "$dir/lib" "$dir/boot"
rm -rf "$dir/lib/modules"
mv "$work/tree/lib/modules" "$dir/lib/modules"
mv "$work/tree"/boot/config-* "$work/tree"/boot/vmlinuz-* "$dir/boot/"

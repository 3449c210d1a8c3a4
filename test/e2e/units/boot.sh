# boot.sh ROOT PROGRAMS makes a root directory and runs systemd in it as the first
# process. It runs in new mount, process, control group and network namespaces.
set -eu
root=$1 programs=$2
mount --make-rprivate /
mount -t tmpfs -o mode=755 root "$root"
cd "$root"
mkdir -p usr etc proc sys dev run tmp root opt/lull old \
	var/tmp var/lib/nginx var/log/nginx var/lib/redis var/log/redis var/lib/postgresql var/log/postgresql
chmod 1777 tmp var/tmp
for l in bin sbin lib lib64; do ln -s "usr/$l" "$l"; done
ln -s /run var/run
mount --bind /usr usr
mount -o remount,bind,ro usr
mount --bind "$programs" opt/lull
cp -a /etc/. etc/
rm -rf etc/systemd/system/*.wants etc/postgresql/*
: >etc/machine-id
chown redis: var/lib/redis var/log/redis
chown postgres: var/lib/postgresql var/log/postgresql
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 dev dev
for n in null zero full random urandom tty; do
	: >dev/$n
	mount --bind /dev/$n dev/$n
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs shm dev/shm
mount -t tmpfs -o mode=755 run run
ip link set lo up
pivot_root . old
exec env -i container=lull PATH=/usr/sbin:/usr/bin /bin/sh -c 'umount -l /old
exec /lib/systemd/systemd --log-target=console --unit=basic.target </dev/null'

package setup

// sysusers is the sysusers.d entry for the group whose members may use the agent.
const sysusers = "g lull - -\n"

// agentUnit returns the agent's systemd unit. command is the command with the verb
// run, such as /usr/bin/lull agent. A test checks that etc/lull-agent.service is the
// unit for /usr/bin/lull-agent.
//
// Hooks run inside the unit, and a hook that saves a user's work must not fail for
// lack of a permission. So the unit restricts neither sudo, nor mounts, nor
// containers; etc/lull-agent-strict.conf does, for machines without hooks.
// ProtectClock is not set because it denies access to all devices, including GPUs.
func agentUnit(command string) string {
	return `[Unit]
Description=lull agent: stops this machine when it is idle
Documentation=file:///usr/share/doc/lull/README.md
Wants=network-online.target
After=network-online.target dbus.service systemd-logind.service

[Service]
Type=exec
ExecStart=` + command + ` run
ExecReload=` + command + ` reload
EnvironmentFile=-/etc/default/lull-agent
Restart=on-failure
RestartSec=10
TimeoutStopSec=30
Nice=10

StateDirectory=lull/agent
StateDirectoryMode=0700
RuntimeDirectory=lull
RuntimeDirectoryPreserve=yes
UMask=0022
LimitNOFILE=8192

ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
RestrictRealtime=yes
LockPersonality=yes

[Install]
WantedBy=multi-user.target
`
}

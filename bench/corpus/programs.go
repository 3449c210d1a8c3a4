package main

import (
	"fmt"
	"strings"
)

func nginxFiles(port int) map[string]string {
	return map[string]string{"index.html": strings.Repeat("<p>hello</p>", 200), "big": strings.Repeat("x", 300_000), "nginx.conf": fmt.Sprintf(
		"user root; pid n.pid; error_log stderr; events {} http { access_log a.log; server { listen 127.0.0.1:%d; root .; location /health { return 200 ok; } } }", port)}
}

const nodeApp = `require('http').createServer((q, a) => {
  let n = 0; if (q.url == '/work') for (let i = 0; i < 2e7; i++) n += i;
  a.end('hello '.repeat(2000) + n); }).listen(+process.argv[2], '127.0.0.1');`

const javaApp = `import com.sun.net.httpserver.*;
class App { public static void main(String[] a) throws Exception {
  HttpServer s = HttpServer.create(new java.net.InetSocketAddress("127.0.0.1", Integer.parseInt(a[0])), 0);
  s.createContext("/", x -> { byte[] b = new byte[20000]; new java.util.Random(1).nextBytes(b); x.sendResponseHeaders(200, b.length); x.getResponseBody().write(b); x.close(); });
  s.start(); } }`

const wsgiApp = `def app(env, start):
    n = sum(i * i for i in range(100000))
    start('200 OK', [('Content-Type', 'text/plain')])
    return [(str(n) * 500).encode()]`

// chatApp pings its clients every 20 s, as a WebSocket server does.
const chatApp = `import asyncio, sys
clients = set()
async def on(r, w):
    clients.add(w)
    try:
        while line := await r.readline():
            for c in list(clients): c.write(line)
    finally: clients.discard(w)
async def main():
    s = await asyncio.start_server(on, '127.0.0.1', int(sys.argv[1]))
    while True:
        await asyncio.sleep(20)
        for c in list(clients): c.write(b'ping\n')
asyncio.run(main())`

// gameApp ticks ten times a second, with and without players.
const gameApp = `import asyncio, sys
clients, world = set(), [[0, 0] for _ in range(200)]
async def on(r, w):
    clients.add(w)
    try:
        while line := await r.readline(): world[0][0] += 1
    finally: clients.discard(w)
async def main():
    await asyncio.start_server(on, '127.0.0.1', int(sys.argv[1]))
    while True:
        await asyncio.sleep(0.1)
        if not clients: continue
        for p in world: p[0] = (p[0] * 31 + 7) % 1000
        for c in list(clients): c.write(str(world[:40]).encode() + b'\n')
asyncio.run(main())`

func postgres(port string) string {
	return "mkdir pg && chown postgres pg && chmod 755 $DIR && cd pg && B=$(ls -d /usr/lib/postgresql/*/bin | head -1) && runuser -u postgres -- $B/initdb -A trust -D $DIR/pg/d >/dev/null && " +
		"exec runuser -u postgres -- $B/postgres -D $DIR/pg/d -p " + port + " -k $DIR/pg -c listen_addresses=127.0.0.1"
}

// jupyter returns a command that starts a Jupyter server with a kernel.
func jupyter(port string) string {
	return "(sleep 12; curl -s -X POST '127.0.0.1:" + port + "/api/kernels?token=t') & python3() { /usr/bin/python3 \"$@\"; }; " +
		"python3 -m jupyter_server --allow-root --ip 127.0.0.1 --port " + port + " --ServerApp.token=t --ServerApp.root_dir=$DIR"
}

const prometheusConfig = "global: {scrape_interval: 15s}\nscrape_configs: [{job_name: self, static_configs: [{targets: ['127.0.0.1:21101']}]}]\n"

// tsserver runs the language server of the TypeScript compiler that the dashboard
// uses.
const tsserver = "node $REPO/web/node_modules/typescript/lib/tsserver.js"

var tsFile = strings.Repeat("export function f(a: number, b: string): string { return b.repeat(a) }\n", 1) + strings.Repeat("console.log(f(2, 'x').length)\n", 400)

const (
	tsOpen = "{\"seq\":1,\"type\":\"request\",\"command\":\"open\",\"arguments\":{\"file\":\"$DIR/a.ts\"}}\n"
	tsEdit = "{\"seq\":2,\"type\":\"request\",\"command\":\"change\",\"arguments\":{\"file\":\"$DIR/a.ts\",\"line\":3,\"offset\":1,\"endLine\":3,\"endOffset\":1,\"insertString\":\"f(1,'a');\"}}\n" +
		"{\"seq\":3,\"type\":\"request\",\"command\":\"geterr\",\"arguments\":{\"delay\":0,\"files\":[\"$DIR/a.ts\"]}}\n" +
		"{\"seq\":4,\"type\":\"request\",\"command\":\"completions\",\"arguments\":{\"file\":\"$DIR/a.ts\",\"line\":3,\"offset\":2}}\n"
)

// agentApp calls a model, waits, and runs the commands in the model's answer.
const agentApp = `import sys, time, socket, subprocess
while True:
    try: s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
    except OSError:
        time.sleep(1)
        continue
    s.sendall(b'POST /v1/messages HTTP/1.0\r\nContent-Length: 0\r\nX-Context: ' + b'y' * 3000 + b'\r\n\r\n')
    while s.recv(65536): pass
    s.close()
    subprocess.run(['sh', '-c', 'find /usr/share -name "*.txt" | head -2000 | xargs wc -l >/dev/null'], stderr=subprocess.DEVNULL)
    time.sleep(1)`

// trainApp alternates between computing and waiting for its data loader.
const trainApp = `import time, random
try:
    import numpy
    a = numpy.random.rand(400, 400)
    step = lambda: a @ a
except ImportError:
    step = lambda: sum(i * i for i in range(200000))
while True:
    end = time.time() + random.uniform(5, 20)
    while time.time() < end: step()
    open('data', 'wb').write(b'x' * 4000000)
    time.sleep(random.uniform(2, 25))`

func cFile() string {
	var b strings.Builder
	b.WriteString("#include <stdio.h>\n")
	for i := range 400 {
		fmt.Fprintf(&b, "int f%d(int a){ int s=0; for(int i=0;i<a;i++) s+=i*%d%%7; printf(\"%%d\",s); return s; }\n", i, i+1)
	}
	return b.String()
}

func tmux(command string) string {
	return "tmux -S $DIR/tmux -f /dev/null new-session -d -x 100 -y 30 \"" + command + "\"; while :; do sleep 1000; done"
}

var sshFiles = map[string]string{"sshd_config": "UsePAM no\nStrictModes no\nPubkeyAuthentication yes\nPermitRootLogin yes\nPidFile none\nAuthorizedKeysFile $DIR/key.pub\nLogLevel ERROR\n"}

func sshd(port string) string {
	return "chmod 755 $DIR; ssh-keygen -q -N '' -t ed25519 -f $DIR/key; ssh-keygen -q -N '' -t ed25519 -f $DIR/host; mkdir -p /run/sshd; " +
		"exec /usr/sbin/sshd -D -e -f $DIR/sshd_config -p " + port + " -h $DIR/host"
}

// ssh returns a command that connects with keep-alives and runs command on a
// terminal.
func ssh(port, command string) string {
	return "ssh -tt -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ServerAliveInterval=30 -i $DIR/key -p " + port + " root@127.0.0.1 '" + command + "' >/dev/null 2>$DIR/ssh.log"
}

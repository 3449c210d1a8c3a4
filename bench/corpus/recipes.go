package main

import "time"

// recipe is one program and its scripted client.
type recipe struct {
	name   string
	files  map[string]string
	run    string // shell command; $DIR is the recipe's directory
	warm   time.Duration
	client script // nil if the program has no client
}

const sec = time.Second

// recipes returns what to record. Most programs have two or more recipes: without
// a client, with a client that only stays connected or checks its health, and in
// use.
func recipes() []recipe {
	var out []recipe
	add := func(name, run string, files map[string]string, warm time.Duration, c script) {
		out = append(out, recipe{name, files, run, warm, c})
	}
	for _, s := range []struct {
		name string
		port int
		c    script
	}{
		{"nginx-idle", 21001, nil},
		{"nginx-health", 21002, browse(21002, 10*sec, 10*sec+1, false, "/health")},
		{"nginx-visit", 21003, browse(21003, 2*sec, 15*sec, true, "/", "/big", "/", "/none")},
	} {
		add(s.name, "nginx -p $DIR -c $DIR/nginx.conf -g 'daemon off;'", nginxFiles(s.port), 5*sec, s.c)
	}
	add("redis-idle", "redis-server --port 21011 --save '' --dir $DIR", nil, 5*sec, nil)
	add("redis-pool", "redis-server --port 21012 --save '' --dir $DIR", nil, 5*sec, talk(21012, 5, 10*sec, 11*sec, "PING\r\n"))
	add("redis-busy", "redis-server --port 21013 --save 60 1 --dir $DIR", nil, 5*sec, talk(21013, 20, 20*time.Millisecond, 200*time.Millisecond, "SET a 1\r\n", "INCR n\r\n", "GET a\r\n"))
	add("node-idle", "node app.js 21021", map[string]string{"app.js": nodeApp}, 8*sec, nil)
	add("node-visit", "node app.js 21022", map[string]string{"app.js": nodeApp}, 8*sec, browse(21022, sec/2, 8*sec, true, "/", "/work", "/"))
	add("java-idle", "java App.java 21031", map[string]string{"App.java": javaApp}, 20*sec, nil)
	add("java-visit", "java App.java 21032", map[string]string{"App.java": javaApp}, 20*sec, browse(21032, sec/2, 8*sec, true, "/"))
	add("python-idle", "python3 -m http.server 21041 --bind 127.0.0.1", nil, 5*sec, nil)
	add("gunicorn-idle", "gunicorn -w 2 -b 127.0.0.1:21051 app:app", map[string]string{"app.py": wsgiApp}, 8*sec, nil)
	add("gunicorn-visit", "gunicorn -w 2 -b 127.0.0.1:21052 app:app", map[string]string{"app.py": wsgiApp}, 8*sec, browse(21052, sec/2, 8*sec, true, "/"))
	add("chat-idle", "python3 chat.py 21061", map[string]string{"chat.py": chatApp}, 5*sec, nil)
	add("chat-away", "python3 chat.py 21062", map[string]string{"chat.py": chatApp}, 5*sec, talk(21062, 3, time.Hour, 2*time.Hour))
	add("chat-busy", "python3 chat.py 21063", map[string]string{"chat.py": chatApp}, 5*sec, talk(21063, 6, 2*sec, 20*sec, "hello, is anyone there?\n", "yes, reviewing the change now\n"))
	add("game-idle", "python3 game.py 21071", map[string]string{"game.py": gameApp}, 5*sec, nil)
	add("game-busy", "python3 game.py 21072", map[string]string{"game.py": gameApp}, 5*sec, talk(21072, 4, 50*time.Millisecond, 150*time.Millisecond, "move 1 2\n"))
	add("postgres-idle", postgres("21081"), nil, 8*time.Minute, nil) // after the background work that follows initdb
	add("postgres-pool", postgres("21082"), nil, 8*time.Minute, through(21182, 21082, "for i in 1 2 3; do (while :; do echo 'select 1;'; sleep 30; done) | psql -q -h 127.0.0.1 -p 21182 -U postgres postgres >/dev/null & done; wait"))
	add("postgres-busy", postgres("21083"), nil, 25*sec, through(21183, 21083, "pgbench -i -q -h 127.0.0.1 -p 21183 -U postgres postgres; pgbench -R 20 -c 3 -T 900 -h 127.0.0.1 -p 21183 -U postgres postgres"))
	add("jupyter-idle", jupyter("21091"), nil, 30*sec, nil)
	add("jupyter-tab", jupyter("21092"), nil, 30*sec, browse(21092, 10*sec, 11*sec, true, "/api/kernels?token=t", "/api/sessions?token=t", "/api/status?token=t"))
	add("prometheus", "prometheus --config.file=p.yml --web.listen-address=127.0.0.1:21101 --storage.tsdb.path=data", map[string]string{"p.yml": prometheusConfig}, 15*sec, nil)
	add("tsserver-idle", tsserver, map[string]string{"a.ts": tsFile}, 15*sec, requests(time.Hour, 2*time.Hour, tsOpen))
	add("tsserver-edit", tsserver, map[string]string{"a.ts": tsFile}, 15*sec, requests(sec/2, 6*sec, tsOpen, tsEdit))
	add("agent-api", "python3 agent.py 21111", map[string]string{"agent.py": agentApp}, 2*sec, api(21111))
	add("train", "python3 train.py", map[string]string{"train.py": trainApp}, 5*sec, nil)
	add("build-c", "while :; do for f in 1 2 3 4; do gcc -O2 -c a.c -o $f.o; done; sleep 1; done", map[string]string{"a.c": cFile()}, 2*sec, nil)
	add("build-go", "mkdir m && cd m && printf 'module m\\ngo 1.21\\n' >go.mod && printf 'package main\\nimport _ \"net/http\"\\nfunc main(){}\\n' >m.go; while :; do GOFLAGS=-p=1 GOCACHE=$DIR/cache go build -a -o m . ; sleep 2; done", nil, 2*sec, nil)
	add("backup", "while :; do tar cz -f b.tgz /usr/share/doc /usr/lib/python3 2>/dev/null; sync b.tgz; rm b.tgz; done", nil, 2*sec, nil)
	add("shell-idle", tmux("bash --norc"), nil, 5*sec, nil)
	add("shell-type", tmux("bash --norc"), nil, 5*sec, keys(sec, 12*sec, "ls -l", "git status", "cd /usr/share && ls | head", "cat /etc/os-release", "find . -maxdepth 2 | wc -l"))
	add("vim-type", tmux("vim -u NONE a.txt"), nil, 5*sec, keys(sec, 8*sec, "ofunc main() { return }", "the next line of this text"))
	add("tmux-tail", tmux("sh -c 'while :; do date; sleep 5; done'"), nil, 5*sec, nil)
	add("ssh-idle", sshd("21121"), sshFiles, 8*sec, through(21221, 21121, ssh("21221", "cat")))
	return out
}

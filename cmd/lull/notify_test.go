package main

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"lull/internal/fleet/warning"
	"lull/internal/fleet/worker"
	"lull/internal/sim/smtpsim"
)

const hookKey = "0123456789abcdef0123456789abcdef"

// receivers are the HTTP servers that receive a script's notifications.
type receivers struct {
	mu    sync.Mutex
	all   map[string]*listening
	posts map[string]*post
}

// post is the mail relay of a script.
type post struct {
	smtpsim.Relay
	at map[string]int
}

type listening struct {
	*httptest.Server
	mu     sync.Mutex
	broken bool
	got    []string // bodies, in order
	at     int      // number of bodies that the script has read
	links  map[string]string
	faults []string
}

func (l *listening) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil || l.broken {
		http.Error(w, "out of order", http.StatusInternalServerError)
		return
	}
	if sig := r.Header.Get("Webhook-Signature"); sig != "" {
		m := hmac.New(sha256.New, []byte(hookKey))
		fmt.Fprintf(m, "%s.%s.%s", r.Header.Get("Webhook-Id"), r.Header.Get("Webhook-Timestamp"), body)
		if want := "v1," + base64.StdEncoding.EncodeToString(m.Sum(nil)); sig != want {
			l.faults = append(l.faults, "a signature does not fit its body")
		}
		if !strings.HasPrefix(r.Header.Get("Content-Type"), "application/cloudevents+json") || !bytes.Contains(body, []byte(`"specversion":"1.0"`)) {
			l.faults = append(l.faults, "it is no CloudEvent: "+string(body))
		}
	}
	l.got = append(l.got, string(body))
}

// commands returns the commands of scripts that use receivers.
func (rs *receivers) commands() map[string]func(*testscript.TestScript, bool, []string) {
	return map[string]func(*testscript.TestScript, bool, []string){
		"receiver": rs.open, "received": rs.received, "link": rs.link, "forged-link": rs.forged, "notice": notice, "mailbox": rs.mailbox, "mailed": rs.mailed, "expires": expires, "contact": contact,
		"broken": func(ts *testscript.TestScript, _ bool, a []string) { rs.set(ts, a[0], true) },
		"mended": func(ts *testscript.TestScript, _ bool, a []string) { rs.set(ts, a[0], false) },
	}
}

func (rs *receivers) of(ts *testscript.TestScript, name string) *listening {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	l := rs.all[ts.Getenv("WORK")+name]
	if l == nil {
		ts.Fatalf("there is no receiver %s", name)
	}
	return l
}

// open starts a receiver: receiver NAME. Its URL is in NAME_URL, its key in NAME_KEY.
func (rs *receivers) open(ts *testscript.TestScript, _ bool, args []string) {
	l := &listening{}
	l.Server = httptest.NewServer(l)
	ts.Defer(l.Close)
	rs.mu.Lock()
	rs.all[ts.Getenv("WORK")+args[0]] = l
	rs.mu.Unlock()
	ts.Setenv(strings.ToUpper(args[0])+"_URL", l.URL+"/"+args[0])
	ts.Setenv(strings.ToUpper(args[0])+"_KEY", hookKey)
}

func (rs *receivers) set(ts *testscript.TestScript, name string, broken bool) {
	l := rs.of(ts, name)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.broken = broken
}

// received waits for a message that contains all of the texts, among those that
// arrived after the last match: received NAME TEXT...
func (rs *receivers) received(ts *testscript.TestScript, _ bool, args []string) {
	l := rs.of(ts, args[0])
	for end := time.Now().Add(3 * time.Minute); time.Now().Before(end); pause() {
		if l.find(args[1:]) {
			if len(l.faults) > 0 {
				ts.Fatalf("%v", l.faults)
			}
			return
		}
	}
	ts.Fatalf("%s never got %q; it got:\n%s", args[0], args[1:], strings.Join(l.got, "\n"))
}

func (l *listening) find(texts []string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := l.at; i < len(l.got); i++ {
		all := true
		for _, t := range texts {
			all = all && strings.Contains(l.got[i], strings.NewReplacer(">", `\u003e`, "<", `\u003c`).Replace(t))
		}
		if !all {
			continue
		}
		l.at = i + 1
		var e struct {
			Data struct {
				Links map[string]string `json:"links"`
			} `json:"data"`
		}
		if json.Unmarshal([]byte(l.got[i]), &e) == nil && e.Data.Links != nil {
			l.links = e.Data.Links
		}
		return true
	}
	return false
}

// mailbox starts a mail relay that rejects recipients at refused@…, and stores the
// relay's address in RELAY. Usage: mailbox
func (rs *receivers) mailbox(ts *testscript.TestScript, _ bool, _ []string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	p := &post{at: map[string]int{}}
	p.Recipient = func(address string) string {
		if strings.HasPrefix(address, "refused@") {
			return "550 there is no such mailbox"
		}
		return ""
	}
	ended := make(chan struct{})
	go func() { defer close(ended); p.Serve(l) }()
	ts.Defer(func() { l.Close() })
	rs.mu.Lock()
	rs.posts[ts.Getenv("WORK")] = p
	rs.mu.Unlock()
	ts.Setenv("RELAY", l.Addr().String())
}

// mailed waits for a mail to an address that contains all of the texts, among those
// that arrived after the last match: mailed ADDRESS TEXT...
func (rs *receivers) mailed(ts *testscript.TestScript, _ bool, args []string) {
	rs.mu.Lock()
	p := rs.posts[ts.Getenv("WORK")]
	rs.mu.Unlock()
	var mails []smtpsim.Mail
	for end := time.Now().Add(3 * time.Minute); time.Now().Before(end); pause() {
		mails = p.Mails()
		for i := p.at[args[0]]; i < len(mails); i++ {
			m := &mails[i]
			text := m.Subject + "\n" + m.Body
			if !slices.Contains(m.To, args[0]) || slices.ContainsFunc(args[1:], func(t string) bool { return !strings.Contains(text, t) }) {
				continue
			}
			p.at[args[0]] = i + 1
			rs.remember(ts, m.Body)
			return
		}
	}
	ts.Fatalf("%s never got %q; the mails are:\n%v", args[0], args[1:], mails)
}

// remember keeps the links of a mail for the command link.
func (rs *receivers) remember(ts *testscript.TestScript, body string) {
	found := map[string]string{}
	for verb, text := range map[string]string{warning.Extend: "Extend by an hour", warning.NotToday: "Not today", warning.Stop: "Stop now"} {
		if _, rest, ok := strings.Cut(strings.ReplaceAll(body, "\r", ""), text+":\n"); ok {
			found[verb], _, _ = strings.Cut(rest, "\n")
		}
	}
	if len(found) > 0 {
		l := rs.of(ts, "hook")
		l.mu.Lock()
		l.links = found
		l.mu.Unlock()
	}
}

// link follows a link of the last warning, either of the receiver hook or of the last
// mail that was waited for, as a browser does: link VERB look|give STATUS TEXT
func (rs *receivers) link(ts *testscript.TestScript, _ bool, args []string) {
	address := rs.of(ts, "hook").links[args[0]]
	visit(ts, address, args[1] == "give", args[2], args[3])
}

// forged opens links without a valid signature: forged-link STATUS TEXT
func (rs *receivers) forged(ts *testscript.TestScript, _ bool, args []string) {
	address := rs.of(ts, "hook").links[warning.Extend]
	cut := strings.LastIndexByte(address, '.')
	middle := strings.LastIndexByte(address, '/') + 20
	other := byte('A')
	if address[middle] == other {
		other = 'B'
	}
	for _, bad := range []string{address[:cut], address[:cut+1], address[:cut] + "." + strings.Repeat("A", 43), address[:middle] + string(other) + address[middle+1:]} {
		for _, give := range []bool{false, true} {
			visit(ts, bad, give, args[0], args[1])
		}
	}
}

func visit(ts *testscript.TestScript, address string, give bool, status, text string) {
	var res *http.Response
	var err error
	if give {
		res, err = http.Post(address, "application/x-www-form-urlencoded", nil)
	} else {
		res, err = http.Get(address)
	}
	ts.Check(err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	ts.Check(err)
	if fmt.Sprint(res.StatusCode) != status || !strings.Contains(string(body), text) {
		ts.Fatalf("give %t answers %d:\n%s", give, res.StatusCode, body)
	}
	if res.Header.Get("Referrer-Policy") != "no-referrer" || res.Header.Get("Cache-Control") != "no-store" || !strings.Contains(res.Header.Get("Content-Security-Policy"), "frame-ancestors 'none'") {
		ts.Fatalf("the page's head is %v", res.Header)
	}
}

// notice waits until CML on a worker shows exactly one notice, which contains a text;
// with a ! until no notice contains it: notice WORKER TEXT
func notice(ts *testscript.TestScript, neg bool, args []string) {
	hc := &http.Client{Timeout: patience, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	last := ""
	for end := time.Now().Add(3 * time.Minute); time.Now().Before(end); pause() {
		var err error
		last, err = notices(ts, hc, args[0])
		if n := strings.Count(last, `"content"`); err == nil && strings.Contains(last, args[1]) != neg && (neg || n == 1) {
			return
		}
	}
	ts.Fatalf("CML of %s, asked for one notice (none: %t) that says %q, says %s", args[0], neg, args[1], last)
}

// expires sets a worker's expiry: expires WORKER ACTION|never LENGTH
func expires(ts *testscript.TestScript, _ bool, args []string) {
	w, err := workerNamed(ts, http.DefaultClient, args[0])
	ts.Check(err)
	d, err := time.ParseDuration(args[2])
	ts.Check(err)
	p := worker.Profile{TTLDeadline: new(time.Now().Add(d)), TTLAction: &args[1]}
	if args[1] == "never" {
		p = worker.Profile{TTLDeadline: &time.Time{}}
	}
	change(ts, w, p)
}

// contact sets the address that is notified about a worker: contact WORKER
// ADDRESS
func contact(ts *testscript.TestScript, _ bool, args []string) {
	w, err := workerNamed(ts, http.DefaultClient, args[0])
	ts.Check(err)
	change(ts, w, worker.Profile{Contacts: args[1:]})
}

func change(ts *testscript.TestScript, w worker.Worker, p worker.Profile) {
	body, err := json.Marshal(p)
	ts.Check(err)
	res, err := call(ts, http.DefaultClient, "PATCH", "/api/v1/workers/"+w.ID, body)
	ts.Check(err)
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		said, err := io.ReadAll(res.Body)
		ts.Fatalf("%s: %s, %v", res.Status, said, err)
	}
}

func call(ts *testscript.TestScript, hc *http.Client, method, path string, body []byte) (*http.Response, error) {
	token, err := os.ReadFile(ts.MkAbs("token"))
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequest(method, ts.Getenv("LULL_SERVER")+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	req.Header.Set("Content-Type", "application/json")
	return hc.Do(req)
}

func workerNamed(ts *testscript.TestScript, hc *http.Client, name string) (worker.Worker, error) {
	res, err := call(ts, hc, "GET", "/api/v1/workers?name="+name, nil)
	if err != nil {
		return worker.Worker{}, err
	}
	defer res.Body.Close()
	var l struct{ Items []worker.Worker }
	if err := json.NewDecoder(res.Body).Decode(&l); err != nil || len(l.Items) != 1 {
		return worker.Worker{}, fmt.Errorf("%d workers, %v", len(l.Items), err)
	}
	return l.Items[0], nil
}

func notices(ts *testscript.TestScript, hc *http.Client, worker string) (string, error) {
	w, err := workerNamed(ts, hc, worker)
	if err != nil {
		return "", err
	}
	host := strings.TrimSuffix(w.HTTPSEndpoint, "/") + ":" + ts.Getenv("CML_PORT")
	in, err := hc.Post(host+"/api/v0/authenticate", "application/json", strings.NewReader(`{"username":"admin","password":"cml"}`))
	if err != nil {
		return "", err
	}
	defer in.Body.Close()
	var session string
	if err := json.NewDecoder(in.Body).Decode(&session); err != nil {
		return "", err
	}
	req, err := http.NewRequest("GET", host+"/api/v0/system/notices", nil)
	if err != nil {
		return "", err
	}
	req.Header.Set("Authorization", "Bearer "+session)
	out, err := hc.Do(req)
	if err != nil {
		return "", err
	}
	defer out.Body.Close()
	b, err := io.ReadAll(out.Body)
	return string(b), err
}

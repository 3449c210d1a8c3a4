// Command foreign runs an emulator of AWS that this project did not write, one
// for each region named as an argument, behind one address: a request goes to
// the region for which it is signed. It prints that address. It is a separate
// module, so that its dependencies are not part of lull.
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"syscall"

	"github.com/sivchari/kumo"
)

// The emulator's instance ids have dashes where those of EC2 have digits, as
// i-f17cf7bd-3df9-467. Clients see a digit of the same length there.
var (
	dashed = regexp.MustCompile(`\bi-([0-9a-f]{8})-([0-9a-f]{4})-([0-9a-f]{3})\b`)
	plain  = regexp.MustCompile(`\bi-([0-9a-f]{8})0([0-9a-f]{4})0([0-9a-f]{3})\b`)
)

// replace changes the ids of a body, which keeps its length.
func replace(body io.ReadCloser, from *regexp.Regexp, to string) (io.ReadCloser, error) {
	defer body.Close()
	b, err := io.ReadAll(body)
	return io.NopCloser(bytes.NewReader(from.ReplaceAll(b, []byte(to)))), err
}

// scope finds the region in the credential scope of a signed request.
var scope = regexp.MustCompile(`Credential=[^/]+/[0-9]{8}/([^/]+)/`)

// region starts a process for one region, because emulators in one process share
// their instances. It ends with this one.
func region() (*url.URL, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(program)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return nil, err
	}
	return url.Parse(strings.TrimSpace(strings.TrimPrefix(line, "serving on ")))
}

func main() {
	runtime.LockOSThread() // the regions end with this thread

	if len(os.Args) == 1 { // one region
		fmt.Println("serving on", kumo.NewServer().URL)
		select {}
	}
	regions := map[string]*httputil.ReverseProxy{}
	for _, name := range os.Args[1:] {
		u, err := region()
		if err != nil {
			log.Fatal(err)
		}
		p := httputil.NewSingleHostReverseProxy(u)
		p.ModifyResponse = func(res *http.Response) (err error) {
			res.Body, err = replace(res.Body, dashed, "i-${1}0${2}0${3}")
			return err
		}
		regions[name] = p
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m := scope.FindStringSubmatch(r.Header.Get("Authorization"))
		if m == nil || regions[m[1]] == nil {
			http.Error(w, "no such region", http.StatusForbidden)
			return
		}
		var err error
		if r.Body, err = replace(r.Body, plain, "i-$1-$2-$3"); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		regions[m[1]].ServeHTTP(w, r)
	}))
	fmt.Println("serving on", s.URL)
	select {} // until it is killed
}

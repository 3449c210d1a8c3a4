// Command serve answers every HTTP request at the address given as its
// argument.
package main

import (
	"fmt"
	"net/http"
	"os"
)

func main() {
	err := http.ListenAndServe(os.Args[1], http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "here") }))
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// Command lull-shim keeps the instances of one host while its daemon restarts
// (package shim). The daemon starts it; users rarely need to.
package main

import (
	"os"

	"lull/internal/shim"
)

func main() {
	if code, ok := shim.Stage(os.Args); ok {
		os.Exit(code)
	}
	os.Exit(shim.Main(os.Args[1:]))
}

//go:build bundle

package bundle

import (
	"embed"
	"io/fs"
)

// packed contains NAME.gz and NAME.sha256 of each helper, which the Makefile
// writes before it builds lull.
//
//go:embed files/*.gz files/*.sha256
var packed embed.FS

var files = func() fs.FS {
	sub, err := fs.Sub(packed, "files")
	if err != nil {
		panic(err) // the folder's name is valid
	}
	return sub
}()

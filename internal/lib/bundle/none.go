//go:build !bundle

package bundle

import "embed"

// files is empty in a binary built without helpers.
var files embed.FS

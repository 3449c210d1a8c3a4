package segment

import (
	"os"

	"golang.org/x/sys/unix"
)

// fewFiles is the number of files up to which each is synced on its own. A sync
// of the whole file system also writes what other programs have changed, such as
// the memory of guests.
const fewFiles = 64

// syncAll makes the content of new files in the folder d durable. If there are
// many, it syncs the whole file system once.
func syncAll(d *os.File, paths map[string]string) error {
	if len(paths) > fewFiles {
		return unix.Syncfs(int(d.Fd()))
	}
	return syncEach(paths)
}

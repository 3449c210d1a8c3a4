package segment

import (
	"os"

	"golang.org/x/sys/unix"
)

// fewFiles are synced one by one. A sync of the whole file system also writes what
// others have changed, such as the memory of guests.
const fewFiles = 64

// syncAll makes the content of new files in the folder d durable. Many of them are
// synced together with everything else in their file system.
func syncAll(d *os.File, paths map[string]string) error {
	if len(paths) > fewFiles {
		return unix.Syncfs(int(d.Fd()))
	}
	return syncEach(paths)
}

//go:build !linux

package segment

import (
	"errors"
	"os"
)

// syncAll makes the content of new files durable, one after the other.
func syncAll(_ *os.File, paths map[string]string) error {
	var errs []error
	for _, path := range paths {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err == nil {
			err = errors.Join(f.Sync(), f.Close())
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

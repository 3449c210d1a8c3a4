package fleet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"lull/internal/store"
)

// Scan summarizes the last discovery scan, whether or not it found anything.
type Scan struct {
	At     time.Time `json:"at"`
	NextAt time.Time `json:"next_at"`
	// Import is the value of discovery_import at that time; off scans nothing.
	Import string `json:"discovery_import"`
	// Tag is the tag of this fleet's instances, as name=value.
	Tag     string          `json:"tag"`
	Regions []ScannedRegion `json:"regions"`
}

// ScannedRegion is one region of one account in a scan. Without Error,
// Instances is the sum of Found and all of Skipped.
type ScannedRegion struct {
	Region  string `json:"aws_region"`
	Account string `json:"account,omitempty"`
	// AMINamePatterns and ImageOwners select images. Instances of other images
	// are found only by Tag.
	AMINamePatterns []string `json:"ami_name_patterns"`
	ImageOwners     []string `json:"image_owners"`
	Error           string   `json:"error,omitempty"`
	Instances       int      `json:"instances"` // not terminated
	Found           int      `json:"found"`
	// Skipped counts the instances that are not listed, by Skip code.
	Skipped map[string]int `json:"skipped"`
}

// Why an instance of a scanned region is not listed.
const (
	SkipWorker    = "worker"    // already a worker
	SkipNoMatch   = "no_match"  // neither the tag nor a matching image name
	SkipLaunching = "launching" // its worker is being launched
	SkipImported  = "imported"  // this scan imported it
	SkipUnread    = "unread"    // reading the store failed
)

const scanKey = "discovery/scan"

var scanCodec = store.Codec[Scan]{Version: 1}

// LastScan returns the last discovery scan; nil if none has finished.
func (f *Fleet) LastScan(ctx context.Context) (*Scan, error) {
	v, err := store.Get(ctx, f.store, scanKey)
	if errors.Is(err, store.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("cannot read the last discovery scan: %w", err)
	}
	s, err := scanCodec.Decode(v.Key, v.Data)
	return &s, err
}

// PutScan records a scan.
func (f *Fleet) PutScan(ctx context.Context, s Scan) error {
	_, err := store.Update(ctx, f.store, scanKey, func(store.Value) ([]byte, []store.Op, error) {
		data, err := scanCodec.Encode(scanKey, s)
		return data, nil, err
	}, f.guards...)
	return err
}

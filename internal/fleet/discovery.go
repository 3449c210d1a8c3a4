package fleet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// foundPrefix begins the keys of discovery's findings.
const foundPrefix = "discovered/"

// Scan summarizes the last discovery scan, whether or not it found anything.
type Scan struct {
	At     time.Time `json:"at"`
	NextAt time.Time `json:"next_at"`
	// Import is the value of discovery_import during the scan; with off nothing is
	// scanned.
	Import string `json:"discovery_import"`
	// Tag is the tag by which this fleet's instances are found, as name=value.
	Tag     string          `json:"tag"`
	Regions []ScannedRegion `json:"regions"`
}

// ScannedRegion is one region of one account in a scan. Without Error,
// Instances is the sum of Found and all of Skipped.
type ScannedRegion struct {
	Region  string `json:"aws_region"`
	Account string `json:"account,omitempty"`
	// AMINamePatterns and ImageOwners select the images whose instances are found.
	// Other instances are found only by Tag.
	AMINamePatterns []string `json:"ami_name_patterns"`
	ImageOwners     []string `json:"image_owners"`
	Error           string   `json:"error,omitempty"`
	Instances       int      `json:"instances"` // number of instances that are not terminated
	Found           int      `json:"found"`
	// Skipped counts the instances that are not listed, by Skip code.
	Skipped map[string]int `json:"skipped"`
}

// Reasons why an instance of a scanned region is not listed.
const (
	SkipWorker    = "worker"    // already a worker
	SkipNoMatch   = "no_match"  // neither the tag nor the image name matches
	SkipLaunching = "launching" // the launch of its worker is in progress
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

// Discovered is an instance that discovery found and that is not imported yet.
type Discovered struct {
	Region        string            `json:"aws_region"`
	Account       string            `json:"account,omitempty"`
	EC2InstanceID string            `json:"ec2_instance_id"`
	Name          string            `json:"name,omitempty"`
	AMIName       string            `json:"ami_name,omitempty"`
	State         string            `json:"state"`
	Tags          map[string]string `json:"tags,omitempty"`
	FirstSeenAt   time.Time         `json:"first_seen_at"`
	// Orphan means that the instance has this fleet's tag but belongs to no known
	// worker.
	Orphan bool `json:"orphan,omitempty"`
}

var discoveredCodec = store.Codec[Discovered]{Version: 1}

// Discovered lists the findings of discovery.
func (f *Fleet) Discovered(ctx context.Context) ([]Discovered, error) {
	page, err := store.List(ctx, f.store, store.Prefix(foundPrefix))
	if err != nil {
		return nil, err
	}
	out := make([]Discovered, 0, len(page.Values))
	for _, v := range page.Values {
		d, err := discoveredCodec.Decode(v.Key, v.Data)
		if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

// PutDiscovered records a finding, or removes it if gone is set.
func (f *Fleet) PutDiscovered(ctx context.Context, d Discovered, gone bool) error {
	key := foundPrefix + d.Region + "/" + d.EC2InstanceID
	_, err := store.Update(ctx, f.store, key, func(old store.Value) ([]byte, []store.Op, error) {
		if gone {
			return nil, nil, nil
		}
		if old.Exists() {
			was, err := discoveredCodec.Decode(key, old.Data)
			if err != nil {
				return nil, nil, err
			}
			d.FirstSeenAt = was.FirstSeenAt
		}
		data, err := discoveredCodec.Encode(key, d)
		return data, nil, err
	}, f.guards...)
	return err
}

// WorkerOf returns the ID of the worker that an instance belongs to, or "".
func (f *Fleet) WorkerOf(ctx context.Context, region, instance string) (string, error) {
	v, err := store.Get(ctx, f.store, worker.InstanceKey(region, instance))
	if errors.Is(err, store.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("cannot find instance %q: %w", instance, err)
	}
	return worker.InstanceOwner(v)
}

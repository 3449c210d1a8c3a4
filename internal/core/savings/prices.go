// Package savings computes what lull saved: hours avoided by actual stops, and
// money from a price table. It is pure; callers supply the state changes.
//
// It never invents a figure: if a price or a volume's size is missing, the
// amount is unknown and never counted as zero.
package savings

import (
	_ "embed" // price table
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"strconv"
	"strings"
	"time"
)

//go:embed prices.csv
var published string

// hoursInMonth is the divisor AWS uses to convert monthly to hourly prices.
const hoursInMonth = 730

// Price is one published price.
type Price struct {
	USD  float64   `json:"usd"` // per hour of an instance, or per GB-month of storage
	AsOf time.Time `json:"as_of"`
}

// Kinds of prices.
const (
	Instance = "instance"
	Storage  = "storage"
)

// MaxUSD is an upper bound for prices; a price at or above it is invalid.
const MaxUSD = 10_000

// Key identifies a price: its kind, region, and instance or volume type.
type Key [3]string

// Kind returns Instance or Storage.
func (k Key) Kind() string { return k[0] }

// Region returns the code of the region, such as eu-west-1.
func (k Key) Region() string { return k[1] }

// Name returns the instance type or the volume type.
func (k Key) Name() string { return k[2] }

// Prices maps what is billed to its price.
type Prices map[Key]Price

// With returns the prices of p and newer. For a key in both, the price of newer
// is used.
func (p Prices) With(newer Prices) Prices {
	out := maps.Clone(p)
	maps.Copy(out, newer)
	return out
}

// maxRows limits the size of a table.
const maxRows = 100_000

// Published returns the table embedded in the binary.
func Published() (Prices, error) { return Read(strings.NewReader(published)) }

// Read parses a table: CSV with the header kind,region,name,usd,as_of. Errors
// name the line.
func Read(in io.Reader) (Prices, error) {
	r := csv.NewReader(in)
	r.Comment, r.FieldsPerRecord, r.TrimLeadingSpace = '#', 5, true
	out := Prices{}
	for first := true; ; first = false {
		row, err := r.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("cannot read the prices: %w", err)
		}
		line, _ := r.FieldPos(0)
		fail := func(what string) (Prices, error) {
			return nil, fmt.Errorf("cannot read the prices: line %d: %s", line, what)
		}
		if first {
			if strings.Join(row, ",") != "kind,region,name,usd,as_of" {
				return fail("want the header kind,region,name,usd,as_of")
			}
			continue
		}
		usd, err := strconv.ParseFloat(row[3], 64)
		if err != nil || !(usd > 0 && usd < MaxUSD) {
			return fail(fmt.Sprintf("%.20q is not a price in USD", row[3]))
		}
		at, err := time.Parse(time.DateOnly, row[4])
		if err != nil {
			return fail(fmt.Sprintf("%.20q is not a date such as 2026-01-31", row[4]))
		}
		if row[0] != Instance && row[0] != Storage || row[1] == "" || row[2] == "" {
			return fail("want instance or storage, a region and a name")
		}
		key := Key{row[0], row[1], row[2]}
		if _, twice := out[key]; twice {
			return fail("duplicate row")
		}
		if out[key] = (Price{usd, at}); len(out) > maxRows {
			return fail("too many rows")
		}
	}
	if len(out) == 0 {
		return nil, errors.New("cannot read the prices: the table is empty")
	}
	return out, nil
}

// Hour returns the hourly price of an instance type, nil if unknown.
func (p Prices) Hour(region, instanceType string) *float64 {
	if v, ok := p[Key{Instance, region, instanceType}]; ok {
		return &v.USD
	}
	return nil
}

// StorageHour returns the hourly price of volumes. It is nil if there are none
// or if any price or size is unknown.
func (p Prices) StorageHour(region string, volumes []Volume) *float64 {
	usd := 0.0
	for _, x := range volumes {
		v, ok := p[Key{Storage, region, x.Type}]
		if !ok || x.GB <= 0 {
			return nil
		}
		usd += v.USD * x.GB / hoursInMonth
	}
	if len(volumes) == 0 {
		return nil
	}
	return &usd
}

// Package savings says what was saved: hours avoided by real stops, and money
// by a table of prices (spec, section 7). It is pure.
//
// It guarantees that nothing is invented: without a price, or without the size
// of the storage, the money is unknown and is never counted as zero. It leaves
// out where changes and workers come from.
package savings

import (
	_ "embed" // the table
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
)

//go:embed prices.csv
var published string

// hoursInMonth is how AWS turns a price for a month into one for an hour.
const hoursInMonth = 730

// Price is one published price.
type Price struct {
	USD  float64   `json:"usd"` // an hour of an instance; a GB-month of storage
	AsOf time.Time `json:"as_of"`
}

// Prices is a table by kind, region and name.
type Prices map[[3]string]Price

// maxRows bounds a table.
const maxRows = 100_000

// Published is the table in the binary.
func Published() (Prices, error) { return Read(strings.NewReader(published)) }

// Read reads a table: CSV with a header kind,region,name,usd,as_of. Errors
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
		if err != nil || !(usd > 0 && usd < 10_000) {
			return fail(fmt.Sprintf("%.20q is no price in USD", row[3]))
		}
		at, err := time.Parse(time.DateOnly, row[4])
		if err != nil {
			return fail(fmt.Sprintf("%.20q is no date like 2026-01-31", row[4]))
		}
		if row[0] != "instance" && row[0] != "storage" || row[1] == "" || row[2] == "" {
			return fail("want instance or storage, a region and a name")
		}
		key := [3]string{row[0], row[1], row[2]}
		if _, twice := out[key]; twice {
			return fail("it is there already")
		}
		if out[key] = (Price{usd, at}); len(out) > maxRows {
			return fail("the table is longer than any that is read")
		}
	}
	if len(out) == 0 {
		return nil, errors.New("cannot read the prices: the table is empty")
	}
	return out, nil
}

// Hour is the price of an hour of an instance type, nil if unknown.
func (p Prices) Hour(region, instanceType string) *float64 {
	if v, ok := p[[3]string{"instance", region, instanceType}]; ok {
		return &v.USD
	}
	return nil
}

// StorageHour is the price of an hour of volumes, nil if there are none, or the
// price or the size of one is unknown.
func (p Prices) StorageHour(region string, volumes []Volume) *float64 {
	usd := 0.0
	for _, x := range volumes {
		v, ok := p[[3]string{"storage", region, x.Type}]
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

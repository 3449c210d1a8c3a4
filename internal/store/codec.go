package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// MaxRecordBytes is the default limit on the size of a record.
const MaxRecordBytes = 512 << 10

// Codec converts between records of type T and their data. The data is the JSON
// object of T, preceded by the version of its format: {"v":3,...}. T must be a struct
// without members "v" and "w".
type Codec[T any] struct {
	// Version is the format that Encode writes, from 1.
	Version int
	// Migrate contains, for each older version v, a function that converts a record
	// of version v, without "v", to version v+1. A version without a function cannot
	// be read.
	Migrate map[int]func(old json.RawMessage) (json.RawMessage, error)
	// MaxBytes is the maximum size of a record; 0 means MaxRecordBytes.
	MaxBytes int
}

// Encode returns the data of rec, to be written to key. Errors: ErrTooLarge,
// and those of encoding/json.
func (c Codec[T]) Encode(key string, rec T) ([]byte, error) {
	body, err := json.Marshal(rec)
	if err != nil {
		return nil, fmt.Errorf("cannot encode record %q: %w", key, err)
	}
	if len(body) < 2 || body[0] != '{' {
		return nil, fmt.Errorf("cannot encode record %q: not a JSON object: %w", key, ErrInvalid)
	}
	data := make([]byte, 0, len(body)+12)
	data = append(data, versionPrefix...)
	data = strconv.AppendInt(data, int64(c.Version), 10)
	if body[1] != '}' {
		data = append(data, ',')
	}
	data = append(data, body[1:]...)
	return data, c.checkSize(key, data)
}

// Decode returns the record in data, which was read from key, converted to the
// codec's version. Errors name the key: ErrNewer, ErrTooLarge, ErrInvalid (not
// a record, a member that T does not have, a failed migration).
func (c Codec[T]) Decode(key string, data []byte) (T, error) {
	var rec T
	if err := c.checkSize(key, data); err != nil {
		return rec, err
	}
	version, body, err := splitVersion(data)
	if err != nil {
		return rec, fmt.Errorf("cannot read record %q: %w: %w", key, ErrInvalid, err)
	}
	if version > c.Version {
		return rec, fmt.Errorf("cannot read record %q: format %d, this version reads up to %d: %w", key, version, c.Version, ErrNewer)
	}
	for ; version < c.Version; version++ {
		step := c.Migrate[version]
		if step == nil {
			return rec, fmt.Errorf("cannot read record %q: no migration from format %d: %w", key, version, ErrInvalid)
		}
		if body, err = step(body); err != nil {
			return rec, fmt.Errorf("cannot migrate record %q from format %d: %w: %w", key, version, ErrInvalid, err)
		}
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&rec); err != nil {
		return *new(T), fmt.Errorf("cannot read record %q: %w: %w", key, ErrInvalid, err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return *new(T), fmt.Errorf("cannot read record %q: data after the record: %w", key, ErrInvalid)
	}
	return rec, nil
}

func (c Codec[T]) checkSize(key string, data []byte) error {
	limit := c.MaxBytes
	if limit == 0 {
		limit = MaxRecordBytes
	}
	if len(data) > limit {
		return fmt.Errorf("cannot use record %q: %d bytes, the limit is %d: %w", key, len(data), limit, ErrTooLarge)
	}
	return nil
}

// endsMember reports whether rest can follow the first member of an object: a comma
// and the next name, or the end of the object.
func endsMember(rest []byte) bool {
	return len(rest) == 1 && rest[0] == '}' || len(rest) > 1 && rest[0] == ',' && rest[1] == '"'
}

const versionPrefix = `{"v":`

// splitVersion removes the version and the write ID from a record. It recognizes the
// form that Encode and Update write; a record with another order of members is parsed
// into a map.
func splitVersion(data []byte) (int, json.RawMessage, error) {
	data = StripWriteID(data)
	if rest, ok := bytes.CutPrefix(data, []byte(versionPrefix)); ok {
		digits := 0
		for digits < len(rest) && digits < 9 && rest[digits] >= '0' && rest[digits] <= '9' {
			digits++
		}
		if digits > 0 && endsMember(rest[digits:]) {
			version, err := strconv.Atoi(string(rest[:digits]))
			if err != nil || version < 1 || rest[0] == '0' {
				return 0, nil, errors.New(`"v" is not a version`)
			}
			if rest[digits] == ',' {
				digits++
			}
			return version, append(json.RawMessage{'{'}, rest[digits:]...), nil
		}
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(data, &members); err != nil {
		return 0, nil, err
	}
	var version int
	if err := json.Unmarshal(members["v"], &version); err != nil || version < 1 {
		return 0, nil, errors.New(`"v" is missing or not a version`)
	}
	delete(members, "v")
	delete(members, "w")
	body, err := json.Marshal(members)
	return version, body, err
}

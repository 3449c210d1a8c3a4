package sim

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"io"

	"go.yaml.in/yaml/v3"

	"lull/internal/sim/world"
)

//go:embed default.yaml
var defaultScenario []byte

// maxScenario is the maximum size of a scenario file.
const maxScenario = 4 << 20

// Default returns the embedded scenario: one region, a dozen workers, users who
// come and go.
func Default() (world.Config, error) { return ParseScenario(defaultScenario) }

// ParseScenario parses a scenario in YAML or JSON. The error for an unknown key
// names its line.
func ParseScenario(b []byte) (world.Config, error) {
	var c world.Config
	if len(b) > maxScenario {
		return c, fmt.Errorf("cannot read scenario: %d bytes are more than %d", len(b), maxScenario)
	}
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(&c); err != nil && !errors.Is(err, io.EOF) {
		return c, fmt.Errorf("cannot read scenario: %w", err)
	}
	return c, nil
}

package policy

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// ThresholdForms explains in help texts how thresholds are written. It is the same
// for policies and simulations.
const ThresholdForms = "cpu=20 (percent) or network=20KB (a minute; a bare number of network and disk is bytes a minute)"

// Thresholds parses thresholds by signal. The results are in percent or, for network
// and disk, in bytes per minute.
func Thresholds(given map[string]string) (map[string]float64, error) {
	if len(given) == 0 {
		return nil, nil
	}
	out := map[string]float64{}
	for name, text := range given {
		number, factor := text, 1.0
		if Flows(name) {
			number = strings.ToLower(strings.TrimSuffix(text, "/min"))
			for unit, f := range map[string]float64{"kb": 1e3, "mb": 1e6, "gb": 1e9} {
				if rest, ok := strings.CutSuffix(number, unit); ok {
					number, factor = rest, f
					break
				}
			}
		}
		v, err := strconv.ParseFloat(number, 64)
		if v *= factor; err != nil || !(v > 0) || math.IsInf(v, 0) {
			return nil, fmt.Errorf("cannot use --threshold %s=%s: want a value above 0, such as %s", name, text, ThresholdForms)
		}
		out[name] = v
	}
	return out, nil
}

// Flows reports whether a signal is measured in bytes per minute.
func Flows(signal string) bool { return signal == "network" || signal == "disk" }

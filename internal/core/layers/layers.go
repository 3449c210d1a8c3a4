// Package layers selects a value that several sources may set. It resolves the
// settings of a fleet, effective policies and the configuration of an agent, each
// with the origin of every value.
package layers

// Strongest returns the value of the first layer for which get reports one, and
// that layer. It returns nil if no layer has a value. layers are ordered from
// the strongest to the weakest.
func Strongest[L, V any](layers []L, get func(*L) (V, bool)) (V, *L) {
	for i := range layers {
		if v, ok := get(&layers[i]); ok {
			return v, &layers[i]
		}
	}
	var none V
	return none, nil
}

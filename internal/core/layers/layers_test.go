package layers_test

import (
	"testing"

	"lull/internal/core/layers"
)

func TestStrongest(t *testing.T) {
	stack := []map[string]int{{"a": 0}, {"a": 1, "b": 2}, {"c": 3}}
	for key, want := range map[string]struct{ value, from int }{"a": {0, 0}, "b": {2, 1}, "c": {3, 2}, "d": {0, -1}} {
		v, from := layers.Strongest(stack, func(l *map[string]int) (int, bool) { v, ok := (*l)[key]; return v, ok })
		at := -1
		for i := range stack {
			if from == &stack[i] {
				at = i
			}
		}
		if v != want.value || at != want.from {
			t.Errorf("%s: %d of layer %d, want %d of %d", key, v, at, want.value, want.from)
		}
	}
}

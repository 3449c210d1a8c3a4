package server_test

import (
	"testing"

	"lull/internal/lib/humax/humaxtest"
)

// TestNoListIsNull encodes an empty value of every response type and checks
// that neither the encoding nor the OpenAPI document allows a null list.
func TestNoListIsNull(t *testing.T) {
	b := newBench(t, memory(t))
	found, types, err := humaxtest.Nulls(b.api.API())
	if err != nil {
		t.Fatal(err)
	}
	if types < 50 {
		t.Errorf("only %d types were checked", types)
	}
	for _, at := range found {
		t.Errorf("%s is null when it is empty", at)
	}
	for _, at := range humaxtest.Nullable(b.api.API().OpenAPI()) {
		t.Errorf("%s may be null by the document", at)
	}
}

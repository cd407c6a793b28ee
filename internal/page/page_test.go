package page

import (
	"slices"
	"testing"
)

func TestSplit(t *testing.T) {
	runs := []Run{{10, 4}, {2, 3}}
	tests := []struct {
		n          uint64
		head, rest []Run
	}{
		{0, nil, runs},
		{3, []Run{{10, 3}}, []Run{{13, 1}, {2, 3}}},
		{4, []Run{{10, 4}}, []Run{{2, 3}}},
		{6, []Run{{10, 4}, {2, 2}}, []Run{{4, 1}}},
		{7, runs, nil},
		{9, runs, nil},
	}
	for _, test := range tests {
		head, rest := Split(runs, test.n)
		if !slices.Equal(head, test.head) || !slices.Equal(rest, test.rest) {
			t.Errorf("Split(%v, %d) = %v, %v; want %v, %v", runs, test.n, head, rest, test.head, test.rest)
		}
	}
	if !slices.Equal(runs, []Run{{10, 4}, {2, 3}}) {
		t.Errorf("the argument was changed to %v", runs)
	}
}

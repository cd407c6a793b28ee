package bench

import (
	"testing"
	"testing/synctest"
)

// TestWakePairs: what is measured is the difference of the two, and a resume
// whose VMM did not come from the pool does not count.
func TestWakePairs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := whole()
		d.poolEmpty = func(n int) bool { return n%7 == 0 }
		o := Quick()
		o.N, o.Scenarios = 4, []string{ScenarioWake}
		res, err := Run(t.Context(), d, o)
		if err != nil {
			t.Fatal(err)
		}
		f := figures(res)
		over, ok := f.fact(factWake, "")
		n, _ := f.fact(factWakePairs, "")
		if !ok || over != 0 || n != wakePairs*4 { // the fake wakes in the same time either way
			t.Errorf("%v ms over %v pairs, %v", over, n, ok)
		}
		for _, metric := range []string{MetricResumeAsk, MetricWake} {
			if r, ok := f.row(selfRow(workloadPython50, CacheWarm, true, 512, metric)); !ok || r.N != wakePairs*4 || r.P50 < costFirst {
				t.Errorf("%s: %+v", metric, r)
			}
		}
		if len(res.Bars) != 1 || !*res.Bars[0].Met {
			t.Errorf("bars %+v", res.Bars)
		}
		if len(d.boxes) != 0 {
			t.Errorf("%d sandboxes are left", len(d.boxes))
		}
		take(2 * costAnswer) // the fake's last answer ends
	})
}

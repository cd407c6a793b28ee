package e2e

import (
	"testing"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/client"
	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestWorkingSetIsLearned: after two cycles, few of the pages that a guest needs
// for an answer are read on demand.
func TestWorkingSetIsLearned(t *testing.T) {
	d := hibtest.Start(t)
	id := d.Create("--memory", "512")
	srv := d.StartServer(id, 20, 8000)
	c, err := client.New(d.URL, d.Key)
	if err != nil {
		t.Fatal(err)
	}
	// A parked machine has all its pages.
	hibernate := func() *api.WorkingSetReport {
		t.Helper()
		sb, err := c.HibernateWith(t.Context(), id, api.HibernateRequest{NoPark: true})
		if err != nil {
			t.Fatal(err)
		}
		return sb.LastHibernate.WorkingSet
	}
	hibernate()
	for range 2 {
		srv.Get("/")
		hibernate()
	}
	srv.Get("/")
	warm := d.Inspect(id).LastResume
	w := hibernate()
	if w == nil || w.Pages < 100 || w.Prefetched+w.Late > w.Pages {
		t.Fatalf("the report is %+v", w)
	}
	t.Logf("resume: %d pages read on demand, set of %d bytes; hibernation: %+v", warm.DemandPages, warm.WorkingSetBytes, *w)
	if warm.WorkingSetBytes != w.Pages*4096 {
		t.Errorf("the set has %d bytes at the resume and %d pages at the hibernation", warm.WorkingSetBytes, w.Pages)
	}
	if w.Late+w.Missed > w.Pages/2 {
		t.Errorf("%d pages were late and %d missed, of a set of %d", w.Late, w.Missed, w.Pages)
	}
	if w.Mispredicted > w.Pages/2 {
		t.Errorf("%d of %d pages were prefetched in vain", w.Mispredicted, w.Pages)
	}

	if _, err := c.ResumeWith(t.Context(), id, api.ResumeRequest{NoPrefetch: true}); err != nil {
		t.Fatal(err)
	}
	if plain := d.Inspect(id).LastResume; plain.PrefetchedBytes != 0 || plain.DemandPages < 100 {
		t.Errorf("without prefetch: %+v", plain)
	}
}

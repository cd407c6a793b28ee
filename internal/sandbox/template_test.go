package sandbox_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/sandbox/sandboxtest"
)

func (h *host) versions(name string) []string {
	h.t.Helper()
	entries, err := os.ReadDir(filepath.Join(h.w.Dir, "templates", name))
	if err != nil && !os.IsNotExist(err) {
		h.t.Fatal(err)
	}
	var list []string
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

func TestTemplateBuild(t *testing.T) {
	h := newHost(t)
	var phases []string
	built, err := h.core.BuildTemplate(t.Context(), sandbox.BuildOptions{Name: "py", MemoryMiB: 512, CPUs: 2}, func(p sandbox.Progress) {
		phases = append(phases, p.Phase)
	})
	if err != nil {
		t.Fatal(err)
	}
	if built.Version != 1 || built.MemoryMiB != 512 || built.CPUs != 2 || len(built.Bases) != 1 || built.Kernel == "" || strings.Join(phases, " ") != "image boot" {
		t.Errorf("built %+v, phases %v", built, phases)
	}
	s := h.create(sandbox.CreateOptions{Template: "py"})
	if s.MemoryMiB != 512 || s.CPUs != 2 {
		t.Errorf("created %+v", s)
	}
	if list, err := h.core.Templates(t.Context()); err != nil || len(list) != 2 || list[0].Name != "base" || list[1].SandboxRefs != 1 {
		t.Errorf("templates %+v, %v", list, err)
	}
	for name, o := range map[string]sandbox.BuildOptions{"name": {Name: "../x"}, "memory": {MemoryMiB: 1}} {
		if _, err := h.core.BuildTemplate(t.Context(), o, nil); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	v, err := h.core.StoreVerify(t.Context(), sandbox.VerifyOptions{}, nil)
	if err != nil || len(v.Faults) != 0 || v.Objects < 4 {
		t.Errorf("verify: %+v, %v", v, err)
	}
	if err := os.Remove(filepath.Join(h.w.Dir, "templates", "py", "v1", "template.json")); err != nil {
		t.Fatal(err)
	}
	if v, err = h.core.StoreVerify(t.Context(), sandbox.VerifyOptions{}, nil); err != nil || len(v.Faults) != 1 || !strings.Contains(v.Faults[0], "template py version 1") {
		t.Errorf("verify of damage: %+v, %v", v, err)
	}
}

// TestOldVersionStays while a sandbox refers to it.
func TestOldVersionStays(t *testing.T) {
	h := newHost(t)
	old := h.create()
	h.ask(old.ID, "set kept")
	h.hibernate(old.ID)
	if built, err := h.core.BuildTemplate(t.Context(), sandbox.BuildOptions{}, nil); err != nil || built.Version != 2 {
		t.Fatalf("built %+v, %v", built, err)
	}
	if s := h.create(); s.TemplateVersion != 2 {
		t.Fatalf("created of version %d", s.TemplateVersion)
	}
	h.crash()
	if got := h.ask(old.ID, "get"); got != "kept" {
		t.Fatalf("it has %q", got)
	}
	if v := h.versions("base"); len(v) != 2 {
		t.Fatalf("versions: %v", v)
	}
	if err := h.core.Delete(t.Context(), old.ID); err != nil {
		t.Fatal(err)
	}
	wait(t, "the old version is gone", func() bool { return len(h.versions("base")) == 1 })
	if built, err := h.core.BuildTemplate(t.Context(), sandbox.BuildOptions{}, nil); err != nil || built.Version != 3 {
		t.Fatalf("built %+v, %v", built, err)
	}
}

// TestFailedBuildKeepsTheOld version.
func TestFailedBuildKeepsTheOld(t *testing.T) {
	for _, step := range []string{"build", "boot", "seal"} {
		h := newHost(t)
		h.hook.set(at(step, false, func(context.Context) error { return errInjected }))
		_, err := h.core.BuildTemplate(t.Context(), sandbox.BuildOptions{}, nil)
		isA(t, err, errInjected)
		if now, err := h.core.Template(t.Context(), "base"); err != nil || now.Version != 1 {
			t.Fatalf("%s: %+v, %v", step, now, err)
		}
		if v := h.versions("base"); len(v) != 1 {
			t.Fatalf("%s: versions: %v", step, v)
		}
		h.create()
		h.hook.set(at(step, false, func(context.Context) error { return errInjected }))
		_, err = h.core.BuildTemplate(t.Context(), sandbox.BuildOptions{Name: "new"}, nil)
		isA(t, err, errInjected)
		_, err = h.core.Template(t.Context(), "new")
		isA(t, err, sandbox.ErrNotFound)
	}
}

func TestRemoveTemplate(t *testing.T) {
	h := newHost(t)
	s := h.create()
	err := h.core.RemoveTemplate(t.Context(), "base")
	isA(t, err, sandbox.ErrConflict)
	if !strings.Contains(err.Error(), "1 sandboxes") {
		t.Errorf("error: %v", err)
	}
	if err := h.core.Delete(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if err := h.core.RemoveTemplate(t.Context(), "base"); err != nil {
		t.Fatal(err)
	}
	isA(t, h.core.RemoveTemplate(t.Context(), "base"), sandbox.ErrNotFound)
	_, err = h.core.Create(t.Context(), sandbox.CreateOptions{})
	isA(t, err, sandbox.ErrNotFound)
	wait(t, "its base snapshot is gone", func() bool { return h.w.Snapshots() == 0 })
	if v := h.versions("base"); len(v) != 0 {
		t.Errorf("left: %v", v)
	}
	if built, err := h.core.BuildTemplate(t.Context(), sandbox.BuildOptions{}, nil); err != nil || built.Version != 1 {
		t.Fatalf("built anew: %+v, %v", built, err)
	}
}

// TestOneBuildAtATime of a template.
func TestOneBuildAtATime(t *testing.T) {
	h := newHost(t)
	g := newGate()
	h.hook.set(at("build", false, g.wait))
	done := make(chan error)
	go func() {
		_, err := h.core.BuildTemplate(t.Context(), sandbox.BuildOptions{Name: "py"}, nil)
		done <- err
	}()
	<-g.reached
	_, err := h.core.BuildTemplate(t.Context(), sandbox.BuildOptions{Name: "py"}, nil)
	isA(t, err, sandbox.ErrConflict)
	isA(t, h.core.RemoveTemplate(t.Context(), "py"), sandbox.ErrConflict)
	close(g.open)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TestNewShapeBootsOnce for all who want it at the same time.
func TestNewShapeBootsOnce(t *testing.T) {
	h := newHost(t)
	var mu sync.Mutex
	boots := 0
	h.hook.set(func(_ context.Context, s sandboxtest.Step) error {
		if s.Name == "boot" && !s.After {
			mu.Lock()
			boots++
			mu.Unlock()
		}
		return nil
	})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := h.core.Create(t.Context(), sandbox.CreateOptions{MemoryMiB: 512}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if boots != 1 {
		t.Fatalf("%d boots", boots)
	}
	if now, err := h.core.Template(t.Context(), "base"); err != nil || len(now.Bases) != 2 {
		t.Fatalf("%+v, %v", now, err)
	}
}

// TestBootThatFails is told to all who wait, and tried again by the next.
func TestBootThatFails(t *testing.T) {
	h := newHost(t)
	h.hook.set(at("boot", false, func(context.Context) error { return errInjected }))
	_, err := h.core.Create(t.Context(), sandbox.CreateOptions{MemoryMiB: 512})
	isA(t, err, errInjected)
	if m := h.w.Machines(); len(m) != 0 {
		t.Fatalf("machines are left: %v", m)
	}
	h.create(sandbox.CreateOptions{MemoryMiB: 512})
}

package servertest

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// Checkpoints returns those that Checkpoint and Restore made.
func (c *Core) Checkpoints(_ context.Context, id string) (list []sandbox.Checkpoint, err error) {
	_, err = c.with("Checkpoints", id, func(s *sandbox.Sandbox) error {
		list = slices.Clone(c.checkpoints[s.ID])
		return nil
	})
	return list, err
}

// Checkpoint keeps nothing but the name.
func (c *Core) Checkpoint(_ context.Context, id, name string) (k sandbox.Checkpoint, err error) {
	_, err = c.with("Checkpoint", id, func(s *sandbox.Sandbox) error {
		if slices.ContainsFunc(c.checkpoints[s.ID], func(k sandbox.Checkpoint) bool { return k.Name == name }) {
			return &sandbox.Error{Kind: sandbox.ErrConflict, Message: "there is a checkpoint " + name + " already", Hint: "choose another name"}
		}
		k = c.keep(s, name, sandbox.CheckpointUser)
		if s.State == sandbox.StateRunning {
			k.Report = &sandbox.HibernateReport{TotalMS: 60, PauseMS: 40, Phases: map[string]float64{"freeze": 10, "thaw": 2}}
		}
		return nil
	})
	return k, err
}

// keep adds a checkpoint. c.mu is held.
func (c *Core) keep(s *sandbox.Sandbox, name string, kind sandbox.CheckpointKind) sandbox.Checkpoint {
	if c.checkpoints == nil {
		c.checkpoints = map[string][]sandbox.Checkpoint{}
	}
	n := len(c.checkpoints[s.ID]) + 1
	if name == "" {
		name = fmt.Sprintf("%s-%d", kind, n)
	}
	k := sandbox.Checkpoint{Name: name, Kind: kind, CreatedAt: time.Now(), Current: true,
		Snapshot: sandbox.Snapshot{ID: "kept", Parent: "base1", CreatedAt: time.Now(), MemoryBytes: 2 << 30, DirtyBytes: 4 << 20, StoredBytes: 1 << 20}}
	c.checkpoints[s.ID] = append(c.checkpoints[s.ID], k)
	s.Checkpoints = n
	return k
}

// RemoveCheckpoint forgets the name.
func (c *Core) RemoveCheckpoint(_ context.Context, id, name string) error {
	_, err := c.with("RemoveCheckpoint", id, func(s *sandbox.Sandbox) error {
		if err := c.has(s, name); err != nil {
			return err
		}
		c.checkpoints[s.ID] = slices.DeleteFunc(c.checkpoints[s.ID], func(k sandbox.Checkpoint) bool { return k.Name == name })
		s.Checkpoints--
		return nil
	})
	return err
}

// has returns an error unless the sandbox has a checkpoint. c.mu is held.
func (c *Core) has(s *sandbox.Sandbox, name string) error {
	if slices.ContainsFunc(c.checkpoints[s.ID], func(k sandbox.Checkpoint) bool { return k.Name == name }) {
		return nil
	}
	return notFound("checkpoint", name)
}

// Restore keeps what was there under another name.
func (c *Core) Restore(_ context.Context, id, name string) (s sandbox.Sandbox, kept string, err error) {
	s, err = c.with("Restore", id, func(s *sandbox.Sandbox) error {
		if err := c.has(s, name); err != nil {
			return err
		}
		kept = c.keep(s, "", sandbox.CheckpointRestore).Name
		return nil
	})
	return s, kept, err
}

// Fork makes sandboxes that run, or sleep.
func (c *Core) Fork(ctx context.Context, id string, o sandbox.ForkOptions) (forks []sandbox.Sandbox, err error) {
	parent, err := c.with("Fork", id, func(s *sandbox.Sandbox) error {
		if o.Checkpoint == "" {
			return nil
		}
		return c.has(s, o.Checkpoint)
	})
	if err != nil {
		return nil, err
	}
	for range max(o.Count, 1) {
		f, err := c.Create(ctx, sandbox.CreateOptions{Template: parent.Template, Labels: parent.Labels, Policy: &parent.Policy})
		if err != nil {
			return nil, err
		}
		if f, err = c.with("Fork", f.ID, func(s *sandbox.Sandbox) error {
			s.ForkedFrom = parent.ID
			if o.Standby {
				s.State = sandbox.StateStandby
			}
			return nil
		}); err != nil {
			return nil, err
		}
		forks = append(forks, f)
	}
	return forks, nil
}

// CreateTemplateFrom makes a template that says what it was made of.
func (c *Core) CreateTemplateFrom(_ context.Context, id, checkpoint, name string) (t sandbox.Template, err error) {
	_, err = c.with("CreateTemplateFrom", id, func(s *sandbox.Sandbox) error {
		if checkpoint != "" {
			if err := c.has(s, checkpoint); err != nil {
				return err
			}
		}
		t = template(name)
		t.MadeOf = s.ID
		c.templates[name] = t
		return nil
	})
	return t, err
}

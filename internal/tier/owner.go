package tier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// owners returns the ids of the nodes that claim the remote store.
func (t *Tier) owners(ctx context.Context) ([]string, error) {
	var ids []string
	for info, err := range t.cfg.Remote.List(ctx, ownerPrefix) {
		if err != nil {
			return nil, fmt.Errorf("remote store: %w", err)
		}
		ids = append(ids, strings.TrimPrefix(info.Key, ownerPrefix))
	}
	return ids, nil
}

// own makes sure that the remote store is this node's alone: it claims one that
// nobody has. The error wraps ErrOwned if it is another's, also in part.
func (t *Tier) own(ctx context.Context) error {
	ids, err := t.owners(ctx)
	if err != nil {
		return err
	}
	if len(ids) == 0 {
		if ids, err = t.claim(ctx); err != nil {
			return err
		}
		if len(ids) > 1 {
			// Of several that claim at the same time each sees another, or was there first.
			err := t.cfg.Remote.Delete(ctx, ownerPrefix+t.cfg.Node)
			return errors.Join(t.ownedBy(ids), err)
		}
	}
	if !slices.Equal(ids, []string{t.cfg.Node}) {
		return t.ownedBy(ids)
	}
	return nil
}

// claim puts this node's claim and returns who then claims the store.
func (t *Tier) claim(ctx context.Context) ([]string, error) {
	if _, err := t.putRemote(ctx, ownerPrefix+t.cfg.Node, func(io.Writer) error { return nil }); err != nil {
		return nil, err
	}
	return t.owners(ctx)
}

// takeOver makes the remote store this node's, whoever's it was. Until all
// other claims are gone nobody owns it.
func (t *Tier) takeOver(ctx context.Context) error {
	ids, err := t.claim(ctx)
	if err != nil {
		return err
	}
	for _, id := range ids {
		if id == t.cfg.Node {
			continue
		}
		if err := t.cfg.Remote.Delete(ctx, ownerPrefix+id); err != nil {
			return fmt.Errorf("remote store: %w", err)
		}
	}
	return t.own(ctx)
}

func (t *Tier) ownedBy(ids []string) error {
	others := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return id == t.cfg.Node })
	return fmt.Errorf("%w: %s belongs to node %s, this one is %s; once that node is gone for good, hib store import --take-over makes it this one's",
		ErrOwned, t.cfg.Where, strings.Join(others, ", "), t.cfg.Node)
}

package client

import (
	"context"
	"net/http"

	"github.com/hibernacle/hibernacle/api"
)

// Checkpoints returns the checkpoints of a sandbox, the oldest first.
func (c *Client) Checkpoints(ctx context.Context, id string) (k []api.Checkpoint, err error) {
	err = c.call(ctx, http.MethodGet, c.endpoint("sandboxes", id, "checkpoints"), nil, &k)
	return k, err
}

// Checkpoint keeps what a sandbox is now under a name; "" gives it one. A
// sandbox that runs goes on, with its connections.
func (c *Client) Checkpoint(ctx context.Context, id, name string) (k api.Checkpoint, err error) {
	err = c.call(ctx, http.MethodPost, c.endpoint("sandboxes", id, "checkpoints"), api.CheckpointRequest{Name: name}, &k)
	return k, err
}

// DeleteCheckpoint deletes a checkpoint. What was made of it stays.
func (c *Client) DeleteCheckpoint(ctx context.Context, id, name string) error {
	return c.call(ctx, http.MethodDelete, c.endpoint("sandboxes", id, "checkpoints", name), nil, nil)
}

// Restore rolls a sandbox back to a checkpoint. What it was is kept as another
// one.
func (c *Client) Restore(ctx context.Context, id, checkpoint string) (r api.Restored, err error) {
	err = c.call(ctx, http.MethodPost, c.endpoint("sandboxes", id, "restore"), api.RestoreRequest{Checkpoint: checkpoint}, &r)
	return r, err
}

// Fork makes sandboxes that begin as copies of one and returns them once they run.
func (c *Client) Fork(ctx context.Context, id string, r api.ForkRequest) (s []api.Sandbox, err error) {
	err = c.call(ctx, http.MethodPost, c.endpoint("sandboxes", id, "fork"), r, &s)
	return s, err
}

// CreateTemplateFrom makes a version of a template whose sandboxes begin where
// a sandbox is, or was at a checkpoint.
func (c *Client) CreateTemplateFrom(ctx context.Context, name string, r api.TemplateFromRequest) (t api.Template, err error) {
	err = c.call(ctx, http.MethodPost, c.endpoint("templates", name, "create-from"), r, &t)
	return t, err
}

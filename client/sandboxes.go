package client

import (
	"context"
	"io"
	"net/http"
	"net/url"

	"github.com/hibernacle/hibernacle/api"
)

// Health returns nil if a daemon answers; it needs no key.
func (c *Client) Health(ctx context.Context) error {
	return c.call(ctx, http.MethodGet, c.endpoint("health"), nil, nil)
}

// Version returns what the daemon runs.
func (c *Client) Version(ctx context.Context) (v api.Version, err error) {
	err = c.call(ctx, http.MethodGet, c.endpoint("version"), nil, &v)
	return v, err
}

// Host returns what the host has for guests and what of it is promised.
func (c *Client) Host(ctx context.Context) (h api.Host, err error) {
	err = c.call(ctx, http.MethodGet, c.endpoint("host"), nil, &h)
	return h, err
}

// Create makes a sandbox and returns it once it runs.
func (c *Client) Create(ctx context.Context, r api.CreateRequest) (s api.Sandbox, err error) {
	err = c.call(ctx, http.MethodPost, c.endpoint("sandboxes"), r, &s)
	return s, err
}

// List returns all sandboxes.
func (c *Client) List(ctx context.Context) (s []api.Sandbox, err error) {
	err = c.call(ctx, http.MethodGet, c.endpoint("sandboxes"), nil, &s)
	return s, err
}

// Get returns one sandbox. It does not wake it.
func (c *Client) Get(ctx context.Context, id string) (s api.Sandbox, err error) {
	err = c.call(ctx, http.MethodGet, c.endpoint("sandboxes", id), nil, &s)
	return s, err
}

// Update changes the policy or the labels of a sandbox. It does not wake it.
func (c *Client) Update(ctx context.Context, id string, r api.UpdateRequest) (s api.Sandbox, err error) {
	err = c.call(ctx, http.MethodPatch, c.endpoint("sandboxes", id), r, &s)
	return s, err
}

// Delete deletes a sandbox with all that is kept of it.
func (c *Client) Delete(ctx context.Context, id string) error {
	return c.call(ctx, http.MethodDelete, c.endpoint("sandboxes", id), nil, nil)
}

// Hold keeps a sandbox from hibernating by itself for a while. It does not wake it.
func (c *Client) Hold(ctx context.Context, id string, r api.HoldRequest) (s api.Sandbox, err error) {
	err = c.call(ctx, http.MethodPost, c.endpoint("sandboxes", id, "hold"), r, &s)
	return s, err
}

// ReleaseHold ends the hold on a sandbox. Idempotent.
func (c *Client) ReleaseHold(ctx context.Context, id string) (s api.Sandbox, err error) {
	err = c.call(ctx, http.MethodDelete, c.endpoint("sandboxes", id, "hold"), nil, &s)
	return s, err
}

// Hibernate brings a sandbox to standby; when it returns, its snapshot is
// durable. Its VMM is parked or released behind that, which Get tells
// afterwards (Parked, and the phase park or release of LastHibernate). Idempotent.
func (c *Client) Hibernate(ctx context.Context, id string) (s api.Sandbox, err error) {
	return c.HibernateWith(ctx, id, api.HibernateRequest{})
}

// HibernateWith is Hibernate with options.
func (c *Client) HibernateWith(ctx context.Context, id string, r api.HibernateRequest) (s api.Sandbox, err error) {
	err = c.call(ctx, http.MethodPost, c.endpoint("sandboxes", id, "hibernate"), r, &s)
	return s, err
}

// Resume wakes a sandbox, a failed one from its last snapshot. Idempotent.
func (c *Client) Resume(ctx context.Context, id string) (s api.Sandbox, err error) {
	return c.ResumeWith(ctx, id, api.ResumeRequest{})
}

// ResumeWith is Resume with options.
func (c *Client) ResumeWith(ctx context.Context, id string, r api.ResumeRequest) (s api.Sandbox, err error) {
	err = c.call(ctx, http.MethodPost, c.endpoint("sandboxes", id, "resume"), r, &s)
	return s, err
}

// Evict lets go of cached copies of what a sandbox in standby is resumed from.
func (c *Client) Evict(ctx context.Context, id string, r api.EvictRequest) (e api.Evicted, err error) {
	err = c.call(ctx, http.MethodPost, c.endpoint("sandboxes", id, "evict"), r, &e)
	return e, err
}

// Exec runs a command in a sandbox to its end and returns what it printed. For
// a terminal, endless output or input see Agent.
func (c *Client) Exec(ctx context.Context, id string, r api.ExecRequest) (out api.ExecResponse, err error) {
	err = c.call(ctx, http.MethodPost, c.endpoint("sandboxes", id, "exec"), r, &out)
	return out, err
}

// Logs opens what the guest printed on its console. With follow it goes on
// until ctx ends or the sandbox is gone. The caller closes it.
func (c *Client) Logs(ctx context.Context, id string, follow bool) (io.ReadCloser, error) {
	u := c.endpoint("sandboxes", id, "logs")
	if follow {
		u.RawQuery = url.Values{"follow": {"true"}}.Encode()
	}
	resp, err := c.do(ctx, http.MethodGet, u, nil, "")
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// HookRuns returns how a sandbox's hooks ran, the last ones, oldest first. It
// wakes nothing.
func (c *Client) HookRuns(ctx context.Context, id string) (runs []api.HookRun, err error) {
	err = c.call(ctx, http.MethodGet, c.endpoint("sandboxes", id, "hooks"), nil, &runs)
	return runs, err
}

// Download opens a file of a sandbox, as user ("" is the default user). size
// is -1 where it is unknown. The caller closes it; a Read that ends with
// io.EOF has delivered the whole file.
func (c *Client) Download(ctx context.Context, id, path, user string) (body io.ReadCloser, size int64, err error) {
	resp, err := c.do(ctx, http.MethodGet, c.filesURL(id, path, user), nil, "")
	if err != nil {
		return nil, 0, err
	}
	return resp.Body, resp.ContentLength, nil
}

// Upload writes a file in a sandbox, as user ("" is the default user), from r.
// size is the length of r, or -1 where it is unknown. Missing folders are made.
func (c *Client) Upload(ctx context.Context, id, path, user string, r io.Reader, size int64) error {
	if size == 0 {
		r = http.NoBody
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, c.filesURL(id, path, user).String(), r)
	if err != nil {
		return err
	}
	req.ContentLength = size
	req.Header.Set("Content-Type", "application/octet-stream")
	resp, err := c.send(req)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

func (c *Client) filesURL(id, path, user string) *url.URL {
	u := c.endpoint("sandboxes", id, "files")
	q := url.Values{"path": {path}}
	if user != "" {
		q.Set("user", user)
	}
	u.RawQuery = q.Encode()
	return u
}

package client

import (
	"context"
	"errors"
	"net/http"

	"github.com/hibernacle/hibernacle/api"
)

// Templates returns all templates.
func (c *Client) Templates(ctx context.Context) (t []api.Template, err error) {
	err = c.call(ctx, http.MethodGet, c.endpoint("templates"), nil, &t)
	return t, err
}

// Template returns one template.
func (c *Client) Template(ctx context.Context, name string) (t api.Template, err error) {
	err = c.call(ctx, http.MethodGet, c.endpoint("templates", name), nil, &t)
	return t, err
}

// BuildTemplate builds a template and returns it. progress, which may be nil,
// hears what is going on.
func (c *Client) BuildTemplate(ctx context.Context, r api.BuildRequest, progress func(api.Progress)) (api.Template, error) {
	last, err := c.lines(ctx, c.endpoint("templates"), r, progress)
	switch {
	case err != nil:
		return api.Template{}, err
	case last.Template == nil:
		return api.Template{}, errors.New("the daemon's answer has no template")
	}
	return *last.Template, nil
}

// DeleteTemplate deletes a template that no sandbox uses.
func (c *Client) DeleteTemplate(ctx context.Context, name string) error {
	return c.call(ctx, http.MethodDelete, c.endpoint("templates", name), nil, nil)
}

package client

import (
	"context"
	"errors"
	"net/http"

	"github.com/hibernacle/hibernacle/api"
)

// StoreStatus returns what the store holds.
func (c *Client) StoreStatus(ctx context.Context) (s api.StoreStatus, err error) {
	err = c.call(ctx, http.MethodGet, c.endpoint("store", "status"), nil, &s)
	return s, err
}

// VerifyStore reads every local object, and every remote one if r says so, and
// compares it with its hash. progress, which may be nil, hears of bytes done and in total.
func (c *Client) VerifyStore(ctx context.Context, r api.VerifyRequest, progress func(api.Progress)) (api.Verify, error) {
	last, err := c.lines(ctx, c.endpoint("store", "verify"), r, progress)
	switch {
	case err != nil:
		return api.Verify{}, err
	case last.Verify == nil:
		return api.Verify{}, errors.New("the daemon's answer has no result")
	}
	return *last.Verify, nil
}

// Collect deletes what no sandbox and no template needs any more.
func (c *Client) Collect(ctx context.Context, r api.CollectRequest) (out api.Collected, err error) {
	err = c.call(ctx, http.MethodPost, c.endpoint("store", "collect"), r, &out)
	return out, err
}

// Drain hibernates everything and lets nothing start from then on, or ends
// that. progress, which may be nil, hears of sandboxes done and in total.
func (c *Client) Drain(ctx context.Context, r api.DrainRequest, progress func(api.Progress)) (api.Drained, error) {
	last, err := c.lines(ctx, c.endpoint("drain"), r, progress)
	switch {
	case err != nil:
		return api.Drained{}, err
	case last.Drained == nil:
		return api.Drained{}, errors.New("the daemon's answer has no result")
	}
	return *last.Drained, nil
}

// Import brings the sandboxes that the remote store holds to the daemon's host.
// progress, which may be nil, hears of bytes done and in total.
func (c *Client) Import(ctx context.Context, r api.ImportRequest, progress func(api.Progress)) (api.Imported, error) {
	last, err := c.lines(ctx, c.endpoint("store", "import"), r, progress)
	switch {
	case err != nil:
		return api.Imported{}, err
	case last.Imported == nil:
		return api.Imported{}, errors.New("the daemon's answer has no result")
	}
	return *last.Imported, nil
}

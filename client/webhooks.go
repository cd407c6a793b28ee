package client

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// AddWebhook has events posted to a URL from now on. The answer has the secret,
// which is shown this once.
func (c *Client) AddWebhook(ctx context.Context, r api.WebhookRequest) (w api.Webhook, err error) {
	err = c.call(ctx, http.MethodPost, c.endpoint("webhooks"), r, &w)
	return w, err
}

// Webhooks returns all webhooks, the oldest first, without their secrets.
func (c *Client) Webhooks(ctx context.Context) (w []api.Webhook, err error) {
	err = c.call(ctx, http.MethodGet, c.endpoint("webhooks"), nil, &w)
	return w, err
}

// RemoveWebhook deletes a webhook.
func (c *Client) RemoveWebhook(ctx context.Context, id string) error {
	return c.call(ctx, http.MethodDelete, c.endpoint("webhooks", id), nil, nil)
}

// ResumeWebhook lets a paused webhook go on where it stopped, and has one that
// waits for its next attempt try at once.
func (c *Client) ResumeWebhook(ctx context.Context, id string) (w api.Webhook, err error) {
	err = c.call(ctx, http.MethodPost, c.endpoint("webhooks", id, "resume"), nil, &w)
	return w, err
}

// TestWebhook posts an event of the type "test" once.
func (c *Client) TestWebhook(ctx context.Context, id string) (t api.WebhookTest, err error) {
	err = c.call(ctx, http.MethodPost, c.endpoint("webhooks", id, "test"), nil, &t)
	return t, err
}

// ErrNotGenuine says that a post is not one of the webhook's.
var ErrNotGenuine = errors.New("the signature or the timestamp of the post is wrong")

// VerifyWebhook checks that a post with these headers and this body, byte by
// byte as it came, was signed with a webhook's secret at most age ago. It returns
// nil or ErrNotGenuine.
func VerifyWebhook(secret string, header http.Header, body []byte, age time.Duration) error {
	stamp := header.Get("Hib-Timestamp")
	seconds, err := strconv.ParseInt(stamp, 10, 64)
	if err != nil || time.Since(time.Unix(seconds, 0)).Abs() > age {
		return ErrNotGenuine
	}
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write(append([]byte(stamp+"."), body...))
	if !hmac.Equal([]byte("v1="+hex.EncodeToString(mac.Sum(nil))), []byte(header.Get("Hib-Signature"))) {
		return ErrNotGenuine
	}
	return nil
}

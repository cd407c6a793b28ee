package s3

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/hibernacle/hibernacle/internal/blob"
)

// minRate is how fast, in bytes per second, a body must move at least.
const minRate = 256 << 10

// unknownSize stands for the size of a body whose size was not told: a page of
// a list.
const unknownSize = 1 << 20

// newTransport returns the HTTP side of a store. It does not wait for ever.
func newTransport(timeout time.Duration) http.RoundTripper {
	dialer := net.Dialer{Timeout: timeout}
	return &deadlines{timeout: timeout, base: &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           dialer.DialContext,
		TLSHandshakeTimeout:   timeout,
		ExpectContinueTimeout: time.Second,
		ForceAttemptHTTP2:     true,
		MaxIdleConnsPerHost:   64, // many read at the same time
		IdleConnTimeout:       time.Minute,
		DisableCompression:    true, // else a range would be of something else
	}}
}

// deadlines is an http.RoundTripper that gives up a request that takes too long
// for what it moves: before the answer, and while its body is read.
type deadlines struct {
	timeout time.Duration
	base    http.RoundTripper
}

func (d *deadlines) allow(size int64) time.Duration {
	if size < 0 {
		size = unknownSize
	}
	return d.timeout + time.Duration(float64(size)/minRate*float64(time.Second))
}

// RoundTrip implements http.RoundTripper.
func (d *deadlines) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	giveUp := func() {
		cancel(fmt.Errorf("%w: no answer within %v, and a second for each %d KiB", blob.ErrUnavailable, d.timeout, minRate>>10))
	}
	timer := time.AfterFunc(d.allow(req.ContentLength), giveUp)
	resp, err := d.base.RoundTrip(req.WithContext(ctx))
	if err != nil {
		timer.Stop()
		err = cause(ctx, req.Context(), err)
		cancel(nil)
		return nil, err
	}
	timer.Reset(d.allow(resp.ContentLength))
	resp.Body = &timedBody{ReadCloser: resp.Body, err: func(err error) error { return cause(ctx, req.Context(), err) }, end: func() {
		timer.Stop()
		cancel(nil)
	}}
	return resp, nil
}

// cause returns why ctx ended if it did by itself, not with its parent; err
// otherwise.
func cause(ctx, parent context.Context, err error) error {
	if ctx.Err() != nil && parent.Err() == nil {
		return context.Cause(ctx)
	}
	return err
}

type timedBody struct {
	io.ReadCloser
	err func(error) error // explains an error of a read
	end func()
}

func (b *timedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		err = b.err(err)
	}
	return n, err
}

func (b *timedBody) Close() error {
	err := b.ReadCloser.Close()
	b.end()
	return err
}

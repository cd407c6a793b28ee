// Package s3 keeps the objects of a blob.Store in a bucket of an S3-compatible
// service: the object a/b is the bucket's object PREFIX/a/b. Any number of
// processes may use a bucket at the same time. The store does not hold objects
// against Delete: reading one that was deleted, or deleted and put again, fails.
//
// The service must know conditional writes (If-None-Match), which keep an object
// from being replaced. Reading needs s3:GetObject and s3:ListBucket; without the latter
// a service answers for a missing object that access is denied.
//
// A Store asks once: see package wrap for retries and limits.
package s3

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/hibernacle/hibernacle/internal/blob"
)

// staleAfter is the age at which an upload that did not end is taken for that
// of a dead writer. Should it be alive after all, its Put fails.
const staleAfter = 24 * time.Hour

// The client waits after a failed request even if it is not to try again. How
// long is a variable of its package.
func init() { minio.DefaultRetryUnit = 0 }

// Store is a blob.Store in a bucket.
type Store struct {
	client *minio.Core
	cfg    Config
}

var _ blob.Store = (*Store)(nil)

// Open returns the store that cfg describes. It asks the service nothing: one
// that is down or refuses the credentials shows with the first use.
func Open(_ context.Context, cfg Config) (*Store, error) {
	cfg.Region = cmp.Or(cfg.Region, DefaultRegion)
	cfg.Timeout = cmp.Or(cfg.Timeout, DefaultTimeout)
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("open S3 store: %w", err)
	}
	if cfg.AccessKey == "" || cfg.SecretKey == "" {
		return nil, fmt.Errorf("open S3 store %s: no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", cfg)
	}
	host, secure, err := cfg.endpoint()
	if err != nil {
		return nil, fmt.Errorf("open S3 store: %w", err)
	}
	lookup := minio.BucketLookupDNS
	if cfg.PathStyle {
		lookup = minio.BucketLookupPath
	}
	client, err := minio.NewCore(host, &minio.Options{
		Creds:        credentials.NewStaticV4(cfg.AccessKey, cfg.SecretKey, cfg.SessionToken),
		Secure:       secure,
		Region:       cfg.Region, // else it would be asked for
		BucketLookup: lookup,
		Transport:    newTransport(cfg.Timeout),
		MaxRetries:   1,
	})
	if err != nil {
		return nil, fmt.Errorf("open S3 store %s: %w", cfg, err)
	}
	return &Store{client: client, cfg: cfg}, nil
}

// name returns the name in the bucket of what has this key.
func (s *Store) name(key string) string {
	if s.cfg.Prefix == "" {
		return key
	}
	return s.cfg.Prefix + "/" + key
}

// key returns the key of an object in the bucket, and whether it is one of this
// store.
func (s *Store) key(name string) (string, bool) {
	key, ok := strings.CutPrefix(name, s.name(""))
	return key, ok && blob.CheckKey(key) == nil
}

// Stat implements blob.Store. It reads the object's last byte: an answer
// without a body would not tell why it failed.
func (s *Store) Stat(ctx context.Context, key string) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	info, body, err := s.getTail(ctx, key, 1)
	if err != nil {
		return blob.Info{}, fmt.Errorf("look at %s: %w", key, err)
	}
	body.Close()
	return info.Info, nil
}

// List implements blob.Store.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		if blob.CheckPrefix(prefix) != nil {
			return // no key begins so
		}
		owner := false
		for o := range s.client.ListObjectsIter(ctx, s.cfg.Bucket, minio.ListObjectsOptions{
			Prefix: s.name(prefix), Recursive: true, FetchOwner: &owner,
		}) {
			if o.Err != nil {
				yield(blob.Info{}, fmt.Errorf("list store %s: %w", s.cfg, explain(ctx, o.Err)))
				return
			}
			key, ok := s.key(o.Key)
			if ok && !yield(blob.Info{Key: key, Size: o.Size, ModTime: o.LastModified}, nil) {
				return
			}
		}
		if err := ctx.Err(); err != nil {
			yield(blob.Info{}, fmt.Errorf("list store %s: %w", s.cfg, err))
		}
	}
}

// Delete implements blob.Store.
func (s *Store) Delete(ctx context.Context, key string) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	err := explain(ctx, s.client.RemoveObject(ctx, s.cfg.Bucket, s.name(key), minio.RemoveObjectOptions{}))
	if err != nil && !errors.Is(err, blob.ErrNotExist) {
		return fmt.Errorf("delete %s: %w", key, err)
	}
	return nil
}

// Clean removes what writers that died have uploaded of unfinished objects. An
// upload counts as dead a day after it began.
func (s *Store) Clean(ctx context.Context) error {
	return s.clean(ctx, time.Now().Add(-staleAfter))
}

// clean removes unfinished uploads that began before.
func (s *Store) clean(ctx context.Context, before time.Time) error {
	var errs []error
	var page minio.ListMultipartUploadsResult
	for more := true; more; more = page.IsTruncated {
		var err error
		page, err = s.client.ListMultipartUploads(ctx, s.cfg.Bucket, s.name(""), page.NextKeyMarker, page.NextUploadIDMarker, "", 1000)
		if err != nil {
			errs = append(errs, explain(ctx, err))
			break
		}
		for _, u := range page.Uploads {
			if _, mine := s.key(u.Key); mine && u.Initiated.Before(before) {
				errs = append(errs, s.abort(ctx, u.Key, u.UploadID))
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("clean store %s: %w", s.cfg, err)
	}
	return nil
}

// abort removes an upload that has not ended, or has just ended.
func (s *Store) abort(ctx context.Context, name, upload string) error {
	err := explain(ctx, s.client.AbortMultipartUpload(ctx, s.cfg.Bucket, name, upload))
	if errors.Is(err, blob.ErrNotExist) {
		return nil
	}
	return err
}

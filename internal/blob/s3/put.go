package s3

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/hibernacle/hibernacle/internal/blob"
)

// partSize is the size of the parts in which an object goes up, and so the
// memory that Put needs. S3 takes 10,000 parts: objects of 80 GiB.
const partSize = 8 << 20

// Put implements blob.Store. What fits into one part is put by one request. The
// service checks each part against its SHA-256.
func (s *Store) Put(ctx context.Context, key string, write func(io.Writer) error) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	u := &upload{ctx: ctx, store: s, name: s.name(key)}
	err := write(u)
	if err == nil {
		err = u.finish()
	}
	if err != nil {
		u.abort()
		return blob.Info{}, fmt.Errorf("put %s: %w", key, err)
	}
	return blob.Info{Key: key, Size: u.size, ModTime: time.Now()}, nil
}

// upload is an object on its way.
type upload struct {
	ctx   context.Context
	store *Store
	name  string
	buf   []byte // what is not sent yet, partSize bytes at most
	size  int64
	id    string // of the multipart upload, empty before the first part is sent
	parts []minio.CompletePart
	err   error // the first one: the object can't become whole after it
}

// Write takes bytes of the object, and sends a part when it is full and more
// comes.
func (u *upload) Write(p []byte) (int, error) {
	n := 0
	for n < len(p) && u.err == nil {
		if u.err = u.ctx.Err(); u.err == nil && len(u.buf) == partSize {
			u.err = u.sendPart()
		}
		if u.err == nil {
			m := min(len(p)-n, partSize-len(u.buf))
			u.buf = append(u.buf, p[n:n+m]...)
			n += m
		}
	}
	u.size += int64(n)
	return n, u.err
}

func (u *upload) sendPart() (err error) {
	client, bucket := u.store.client, u.store.cfg.Bucket
	if u.id == "" {
		if u.id, err = client.NewMultipartUpload(u.ctx, bucket, u.name, minio.PutObjectOptions{}); err != nil {
			return explain(u.ctx, err)
		}
	}
	part, err := client.PutObjectPart(u.ctx, bucket, u.name, u.id, len(u.parts)+1, bytes.NewReader(u.buf), int64(len(u.buf)),
		minio.PutObjectPartOptions{Sha256Hex: sum(u.buf), DisableContentSha256: true})
	if err != nil {
		return explain(u.ctx, err)
	}
	u.parts = append(u.parts, minio.CompletePart{PartNumber: part.PartNumber, ETag: part.ETag})
	u.buf = u.buf[:0]
	return nil
}

// finish makes the object visible, unless there is one of its name.
func (u *upload) finish() error {
	if err := errors.Join(u.err, u.ctx.Err()); err != nil {
		return err
	}
	client, bucket := u.store.client, u.store.cfg.Bucket
	// The hash replaces the client's own way of signing content.
	opts := minio.PutObjectOptions{DisableContentSha256: true}
	opts.SetMatchETagExcept("*")
	var err error
	if u.id == "" {
		_, err = client.PutObject(u.ctx, bucket, u.name, bytes.NewReader(u.buf), int64(len(u.buf)), "", sum(u.buf), opts)
	} else {
		if err := u.sendPart(); err != nil {
			return err
		}
		_, err = client.CompleteMultipartUpload(u.ctx, bucket, u.name, u.id, u.parts, opts)
	}
	if conditionFailed(err) {
		return blob.ErrExist
	}
	return explain(u.ctx, err)
}

// abort removes what was sent. If that fails the service keeps parts that
// nobody sees, until Clean.
func (u *upload) abort() {
	if u.id != "" {
		u.store.abort(context.WithoutCancel(u.ctx), u.name, u.id)
	}
}

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

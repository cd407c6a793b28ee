package s3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/minio/minio-go/v7"

	"github.com/hibernacle/hibernacle/internal/blob"
)

// tailSize is how many bytes of an object's end Open fetches: a pack has its
// index there, and small objects come whole.
const tailSize = 128 << 10

// object is an open object.
type object struct {
	store *Store
	key   string
	size  int64
	etag  string // of the object that was opened
	tail  []byte // its last bytes

	ctx   context.Context // of the reads, for ReadAt has none: Close ends it
	close context.CancelFunc
}

var _ blob.RemoteObject = (*object)(nil)

// Open implements blob.Store, with one request.
func (s *Store) Open(ctx context.Context, key string) (blob.Object, error) {
	if err := blob.CheckKey(key); err != nil {
		return nil, err
	}
	info, body, err := s.getTail(ctx, key, tailSize)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", key, err)
	}
	defer body.Close()
	o := &object{store: s, key: key, size: info.Size, etag: info.etag, tail: make([]byte, min(info.Size, tailSize))}
	if _, err := io.ReadFull(body, o.tail); err != nil {
		return nil, fmt.Errorf("open %s: %w", key, explain(ctx, err))
	}
	o.ctx, o.close = context.WithCancel(context.WithoutCancel(ctx))
	return o, nil
}

func (o *object) Size() int64  { return o.size }
func (o *object) Remote() bool { return true }
func (o *object) Tail() int64  { return int64(len(o.tail)) }

// Close ends the reads under way.
func (o *object) Close() error {
	o.close()
	return nil
}

// ReadAt fetches exactly the bytes that the tail does not have.
func (o *object) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read %s: negative offset %d", o.key, off)
	}
	if off >= o.size {
		return 0, io.EOF
	}
	want := p[:min(int64(len(p)), o.size-off)]
	tailAt := o.size - int64(len(o.tail))
	far := want[:min(int64(len(want)), max(0, tailAt-off))]
	if len(far) > 0 {
		if n, err := o.fetch(far, off); err != nil {
			return n, fmt.Errorf("read %s, %d bytes at %d: %w", o.key, len(far), off, err)
		}
	}
	copy(want[len(far):], o.tail[max(0, off-tailAt):])
	if len(want) < len(p) {
		return len(want), io.EOF
	}
	return len(want), nil
}

// fetch fills p with one request and returns how many bytes came.
func (o *object) fetch(p []byte, off int64) (int, error) {
	info, body, err := o.store.get(o.ctx, o.key, fmt.Sprintf("bytes=%d-%d", off, off+int64(len(p))-1), o.etag)
	if conditionFailed(err) {
		return 0, fmt.Errorf("%w: it was replaced since it was opened", blob.ErrNotExist)
	} else if err != nil {
		return 0, explain(o.ctx, err)
	}
	defer body.Close()
	if info.start != off || info.length != int64(len(p)) || info.Size != o.size {
		return 0, fmt.Errorf("%w: asked for a range, the service sent bytes %d to %d of %d", blob.ErrRefused, info.start, info.start+info.length, info.Size)
	}
	n, err := io.ReadFull(body, p)
	return n, explain(o.ctx, err)
}

// answer describes an object and the part of it that the service sends.
type answer struct {
	blob.Info
	etag          string
	start, length int64 // of the part, in bytes
}

// getTail asks for the last n bytes of an object. The caller closes the body,
// which has fewer if the object is smaller.
func (s *Store) getTail(ctx context.Context, key string, n int64) (answer, io.ReadCloser, error) {
	a, body, err := s.get(ctx, key, fmt.Sprintf("bytes=-%d", n), "")
	if minio.ToErrorResponse(err).StatusCode == http.StatusRequestedRangeNotSatisfiable {
		// An empty object has no last bytes: some services say so, and no more.
		info, err := s.client.StatObject(ctx, s.cfg.Bucket, s.name(key), minio.StatObjectOptions{})
		if err == nil && info.Size != 0 {
			err = fmt.Errorf("%w: the service does not send the end of an object", blob.ErrRefused)
		}
		return answer{Info: blob.Info{Key: key, ModTime: info.LastModified}}, http.NoBody, explain(ctx, err)
	} else if err != nil {
		return answer{}, nil, explain(ctx, err)
	}
	if a.length != min(n, a.Size) || a.start != a.Size-a.length {
		body.Close()
		return answer{}, nil, fmt.Errorf("%w: asked for the last %d bytes, the service sent %d at %d of %d", blob.ErrRefused, n, a.length, a.start, a.Size)
	}
	return a, body, nil
}

// get asks for a range of an object; it must have this ETag, unless that is
// empty. The caller closes the body. The error is the client's own.
func (s *Store) get(ctx context.Context, key, byteRange, etag string) (answer, io.ReadCloser, error) {
	var opts minio.GetObjectOptions
	opts.Set("Range", byteRange)
	if etag != "" {
		if err := opts.SetMatchETag(etag); err != nil {
			return answer{}, nil, err
		}
	}
	body, info, header, err := s.client.GetObject(ctx, s.cfg.Bucket, s.name(key), opts)
	if err != nil {
		return answer{}, nil, err
	}
	a := answer{Info: blob.Info{Key: key, Size: info.Size, ModTime: info.LastModified}, etag: info.ETag, length: info.Size}
	if r := header.Get("Content-Range"); r != "" { // else the whole object comes
		a.start, a.length, a.Size, err = parseContentRange(r)
	}
	if err == nil && (a.length < 0 || info.Size >= 0 && info.Size != a.length) {
		err = fmt.Errorf("%w: it sent %d bytes as %d", blob.ErrRefused, info.Size, a.length)
	}
	if err != nil {
		body.Close()
		return answer{}, nil, err
	}
	return a, body, nil
}

// parseContentRange reads where a part begins, its length and the size of the
// whole from a header of the form "bytes 0-9/100".
func parseContentRange(header string) (start, length, size int64, err error) {
	unit, r, _ := strings.Cut(header, " ")
	part, whole, _ := strings.Cut(r, "/")
	first, last, _ := strings.Cut(part, "-")
	start, err1 := strconv.ParseInt(first, 10, 64)
	end, err2 := strconv.ParseInt(last, 10, 64)
	size, err3 := strconv.ParseInt(whole, 10, 64)
	if errors.Join(err1, err2, err3) != nil || unit != "bytes" || start < 0 || end < start || end >= size {
		return 0, 0, 0, fmt.Errorf("%w: it sent the range %q", blob.ErrRefused, header)
	}
	return start, end - start + 1, size, nil
}

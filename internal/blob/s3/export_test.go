package s3

import (
	"bytes"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
)

// CleanBefore is Clean for uploads that began before a time.
func (s *Store) CleanBefore(t *testing.T, before time.Time) {
	t.Helper()
	if err := s.clean(t.Context(), before); err != nil {
		t.Fatal(err)
	}
}

// BeginUpload leaves an upload of one part as a dead writer does.
func (s *Store) BeginUpload(t *testing.T, key string) {
	t.Helper()
	id, err := s.client.NewMultipartUpload(t.Context(), s.cfg.Bucket, s.name(key), minio.PutObjectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.PutObjectPart(t.Context(), s.cfg.Bucket, s.name(key), id, 1, bytes.NewReader([]byte("part")), 4, minio.PutObjectPartOptions{}); err != nil {
		t.Fatal(err)
	}
}

// Uploads returns how many unfinished uploads the bucket has.
func (s *Store) Uploads(t *testing.T) int {
	t.Helper()
	page, err := s.client.ListMultipartUploads(t.Context(), s.cfg.Bucket, "", "", "", "", 1000)
	if err != nil {
		t.Fatal(err)
	}
	return len(page.Uploads)
}

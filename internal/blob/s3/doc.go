// Package s3 keeps the objects of a blob.Store in a bucket of an
// S3-compatible service.
package s3

package s3

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"

	"github.com/minio/minio-go/v7"

	"github.com/hibernacle/hibernacle/internal/blob"
)

// explain turns an error of the client into one of package blob, in words that
// say what to do. That ctx has ended goes before everything else.
func explain(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if cerr := ctx.Err(); cerr != nil {
		return cerr
	}
	if errors.Is(err, blob.ErrUnavailable) { // said already
		return err
	}
	var resp minio.ErrorResponse
	if errors.As(err, &resp) {
		what, kind := classify(resp)
		if what == "" {
			return fmt.Errorf("%w (%s)", kind, resp.Code)
		}
		return fmt.Errorf("%w: %s (%s: %s)", kind, what, resp.Code, resp.Message)
	}
	var cert *tls.CertificateVerificationError
	if errors.As(err, &cert) {
		return fmt.Errorf("%w: its certificate is not trusted here: %w", blob.ErrRefused, err)
	}
	return fmt.Errorf("%w: %w", blob.ErrUnavailable, err)
}

// classify returns what an answer says to people, and the error of package blob
// that it means.
func classify(resp minio.ErrorResponse) (what string, kind error) {
	switch resp.Code {
	case minio.NoSuchKey, "NoSuchUpload":
		return "", blob.ErrNotExist
	case minio.NoSuchBucket:
		return "there is no such bucket: make it, or correct the store's address", blob.ErrRefused
	case "RequestTimeTooSkewed":
		return "set this host's clock", blob.ErrRefused
	case "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", minio.InvalidRegion, "IllegalLocationConstraintException":
		return "correct the region or the endpoint in the store's address", blob.ErrRefused
	case "ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId", "SignatureDoesNotMatch":
		return "the credentials are not valid (any more): check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN", blob.ErrRefused
	case "XMinioStorageFull", "QuotaExceeded", "InsufficientStorage":
		return "the bucket takes no more", blob.ErrNoSpace
	case "RequestTimeout", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "InvalidPart":
		return "the request arrived damaged", blob.ErrUnavailable
	}
	switch status := resp.StatusCode; {
	case status == http.StatusNotFound:
		return "the service does not know what was asked for: check the endpoint in the store's address", blob.ErrRefused
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return "access is denied: check the credentials and the permissions that they have in the bucket", blob.ErrRefused
	case status == http.StatusInsufficientStorage:
		return "the bucket takes no more", blob.ErrNoSpace
	case status == http.StatusNotImplemented || status == http.StatusMethodNotAllowed:
		return "the service lacks a feature, maybe conditional writes", blob.ErrRefused
	case status == http.StatusTooManyRequests || status == http.StatusConflict || status == http.StatusRequestTimeout || status/100 != 4:
		return "try again later", blob.ErrUnavailable
	default:
		return "it did not understand the request", blob.ErrRefused
	}
}

// conditionFailed reports whether err says that the condition of a request does
// not hold.
func conditionFailed(err error) bool {
	var resp minio.ErrorResponse
	return errors.As(err, &resp) && (resp.Code == minio.PreconditionFailed || resp.StatusCode == http.StatusPreconditionFailed)
}

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
		kind, what := classify(resp)
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

// classify returns the error of package blob that an answer means, and what it
// says to people.
func classify(resp minio.ErrorResponse) (kind error, what string) {
	switch resp.Code {
	case minio.NoSuchKey, "NoSuchUpload":
		return blob.ErrNotExist, ""
	case minio.NoSuchBucket:
		return blob.ErrRefused, "there is no such bucket: make it, or correct the store's address"
	case "RequestTimeTooSkewed":
		return blob.ErrRefused, "set this host's clock"
	case "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", minio.InvalidRegion, "IllegalLocationConstraintException":
		return blob.ErrRefused, "correct the region or the endpoint in the store's address"
	case "ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId", "SignatureDoesNotMatch":
		return blob.ErrRefused, "the credentials are not valid (any more): check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"
	case "XMinioStorageFull", "QuotaExceeded", "InsufficientStorage":
		return blob.ErrNoSpace, "the bucket takes no more"
	case "RequestTimeout", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "InvalidPart":
		return blob.ErrUnavailable, "the request arrived damaged"
	}
	switch status := resp.StatusCode; {
	case status == http.StatusNotFound:
		return blob.ErrRefused, "the service does not know what was asked for: check the endpoint in the store's address"
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return blob.ErrRefused, "access is denied: check the credentials and the permissions that they have in the bucket"
	case status == http.StatusInsufficientStorage:
		return blob.ErrNoSpace, "the bucket takes no more"
	case status == http.StatusNotImplemented || status == http.StatusMethodNotAllowed:
		return blob.ErrRefused, "the service lacks a feature, maybe conditional writes"
	case status == http.StatusTooManyRequests || status == http.StatusConflict || status == http.StatusRequestTimeout || status/100 != 4:
		return blob.ErrUnavailable, "try again later"
	default:
		return blob.ErrRefused, "it did not understand the request"
	}
}

// conditionFailed reports whether err says that the condition of a request does
// not hold.
func conditionFailed(err error) bool {
	var resp minio.ErrorResponse
	return errors.As(err, &resp) && (resp.Code == minio.PreconditionFailed || resp.StatusCode == http.StatusPreconditionFailed)
}

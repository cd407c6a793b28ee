package guest

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"syscall"
	"time"
)

// apiError is the body of an error answer that is not Connect's.
type apiError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

func writeError(w http.ResponseWriter, status int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(apiError{Code: status, Message: message}) // the client has gone, if anything
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

// statusOf returns the HTTP status for an error of the file system or of a caller's account.
func statusOf(err error) int {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return http.StatusNotFound
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return http.StatusInsufficientStorage
	case errors.Is(err, errNoUser):
		return http.StatusUnauthorized
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return http.StatusForbidden
	case errors.Is(err, errBadRequest), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EISDIR),
		errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.ELOOP):
		return http.StatusBadRequest
	}
	return http.StatusInternalServerError
}

// errBadRequest marks errors that are the caller's.
var errBadRequest = errors.New("bad request")

type writerKey struct{}

// withWriter lets the services reach the writer of their response, to limit
// how long a write may take.
func withWriter(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := http.NewResponseController(w)
		_ = c.SetWriteDeadline(time.Time{}) // an earlier request's on this connection
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), writerKey{}, c)))
	})
}

// limitWrites makes writes of ctx's response fail that are not done within d
// from now: a client that takes nothing must not hold anything up.
func limitWrites(ctx context.Context, d time.Duration) {
	if c, ok := ctx.Value(writerKey{}).(*http.ResponseController); ok {
		_ = c.SetWriteDeadline(time.Now().Add(d))
	}
}

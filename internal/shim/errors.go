package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/vmm"
)

// Errors of Launch, Adopt and the client's methods besides *Error.
var (
	ErrGone     = errors.New("the shim's process has ended")
	ErrProtocol = errors.New("the shim speaks another version of the protocol")
	ErrRefused  = errors.New("nothing listens on that port of the guest")
	ErrUnknown  = errors.New("the shim is older than this order and does not know it")
)

// Error makes the answer an error.
func (e *Error) Error() string { return e.Message }

// Code returns the code of an error that a shim answered with, CodeFailed for
// another error and "" for nil.
func Code(err error) string {
	var e *Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e):
		return e.Code
	}
	return CodeFailed
}

func errorf(code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// classify finds the code for an error of the parts that a shim is made of.
func classify(err error) *Error {
	var e *Error
	code := CodeFailed
	switch {
	case errors.As(err, &e):
		code = e.Code
	case errors.Is(err, blob.ErrUnavailable):
		code = CodeUnavailable
	case errors.Is(err, snapshot.ErrCorrupt), errors.Is(err, snapshot.ErrMissing):
		code = CodeCorrupt
	case errors.Is(err, blob.ErrNoSpace):
		code = CodeNoSpace
	case errors.Is(err, vmm.ErrExited):
		code = CodeStopped
	case errors.Is(err, context.Canceled):
		code = CodeRefused
	}
	return &Error{Code: code, Message: err.Error()}
}

// status maps a code to the HTTP status that it travels with.
func (e *Error) status() int {
	switch e.Code {
	case CodeInvalid, CodeMismatch:
		return http.StatusBadRequest
	case CodeUnknown:
		return http.StatusNotFound
	case CodeRefused, CodeStopped:
		return http.StatusConflict
	case CodeNoSpace:
		return http.StatusInsufficientStorage
	case CodeGuest:
		return http.StatusBadGateway
	case CodeUnavailable:
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

func writeError(w http.ResponseWriter, err error) {
	e := classify(err)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.status())
	_ = json.NewEncoder(w).Encode(e) // the caller is gone: nobody to tell
}

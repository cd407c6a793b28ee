package sandbox

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/hibernacle/hibernacle/internal/catalog"
	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/template"
)

// The kinds of errors of this package; test with errors.Is. What the methods
// of Core return names the object in its message, and Hint finds what to do.
var (
	ErrNotFound    = errors.New("not found")
	ErrConflict    = errors.New("the state does not allow it")
	ErrInvalid     = errors.New("invalid")
	ErrFailed      = errors.New("the sandbox has failed")
	ErrNoSpace     = errors.New("no space left")
	ErrUnavailable = errors.New("not available now")
	ErrRefused     = errors.New("nothing answers at the port")
)

// Error is an error of this package with what a user needs to act on it.
type Error struct {
	Kind    error  // one of the kinds above
	Message string // names the object and says what is wrong
	Hint    string // what to do about it, "" if there is nothing to say
	Cause   error  // what lies beneath, may be nil
}

// Error returns the message, with the cause behind it.
func (e *Error) Error() string {
	if e.Cause != nil {
		return e.Message + ": " + e.Cause.Error()
	}
	return e.Message
}

// Unwrap returns the kind and the cause.
func (e *Error) Unwrap() []error {
	if e.Cause != nil {
		return []error{e.Kind, e.Cause}
	}
	return []error{e.Kind}
}

// Hint returns what a user can do about err, "" if nothing is known.
func Hint(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Hint
	}
	return ""
}

// Causes of cancelled transitions.
var (
	errRequest = errors.New("cancelled by a request")
	errDelete  = errors.New("cancelled by its deletion")
	errHeld    = errors.New("cancelled by a hold")
	errClosing = errors.New("the daemon is stopping")

	errSuperseded = errors.New("the sandbox has another snapshot by now") // cancels a compaction
)

func notFound(what, name string) error {
	return &Error{Kind: ErrNotFound, Message: fmt.Sprintf("%s %s not found", what, name),
		Hint: map[string]string{"sandbox": "hib ls shows the sandboxes", "template": "hib template ls shows the templates, hib template build " + name + " builds one"}[what]}
}

func invalid(format string, args ...any) error {
	return &Error{Kind: ErrInvalid, Message: fmt.Sprintf(format, args...)}
}

func conflict(hint, format string, args ...any) error {
	return &Error{Kind: ErrConflict, Message: fmt.Sprintf(format, args...), Hint: hint}
}

func unavailable(cause error, format string, args ...any) error {
	return &Error{Kind: ErrUnavailable, Message: fmt.Sprintf(format, args...), Hint: "try again", Cause: cause}
}

// failedError says why a failed sandbox does not answer, and the way out.
func failedError(rec *record) error {
	hint := "hib resume " + rec.ID + " brings it back from its last snapshot, hib rm " + rec.ID + " deletes it"
	if rec.Snapshot == nil {
		hint = "it has no snapshot: hib rm " + rec.ID + " deletes it"
	}
	return &Error{Kind: ErrFailed, Message: fmt.Sprintf("sandbox %s has failed: %s", rec.ID, rec.Reason), Hint: hint}
}

// stepError wraps the failure of a step of an operation on an object with the
// kind that fits its cause.
func stepError(cause error, format string, args ...any) error {
	if _, ok := errors.AsType[*Error](cause); ok {
		return cause
	}
	e := &Error{Kind: ErrUnavailable, Message: fmt.Sprintf(format, args...), Hint: "try again; hib logs and the daemon's log say more", Cause: cause}
	switch {
	case errors.Is(cause, syscall.ENOSPC), shimCode(cause) == shim.CodeNoSpace:
		e.Kind, e.Hint = ErrNoSpace, "free space on the disk of the data folder, or delete sandboxes"
	case errors.Is(cause, errRequest), errors.Is(cause, errHeld), errors.Is(cause, errDelete):
		e.Kind, e.Hint = ErrConflict, ""
	case errors.Is(cause, errClosing):
		e.Hint = "try again when the daemon is back"
	case fatal(cause):
		e.Kind, e.Hint = ErrFailed, fatalHint(cause)
	}
	return e
}

// fatal reports whether a resume that failed with err would fail again: its
// snapshot or its base image is damaged, missing or made for another machine.
func fatal(err error) bool {
	switch shimCode(err) {
	case shim.CodeCorrupt, shim.CodeMismatch:
		return true
	}
	return errors.Is(err, snapshot.ErrCorrupt) || errors.Is(err, snapshot.ErrMissing) ||
		errors.Is(err, template.ErrCorrupt) || errors.Is(err, template.ErrFormat)
}

// fatalHint says what to do about an error that is fatal.
func fatalHint(err error) string {
	if shimCode(err) == shim.CodeMismatch {
		return "another version of hib made it: that one can still resume it, and hib template build NAME makes a template anew"
	}
	return "hib store verify checks the store"
}

// ended reports whether err proves that a shim or its machine is no more.
func ended(err error) bool {
	return errors.Is(err, shim.ErrGone) || shimCode(err) == shim.CodeStopped
}

// shimCode returns the code of an error that a shim answered with, "" if it is none.
func shimCode(err error) string {
	if e, ok := errors.AsType[*shim.Error](err); ok {
		return e.Code
	}
	return ""
}

// causeOf returns why ctx ended in place of err if err is only its echo.
func causeOf(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// isNotFound reports whether the catalog has no such record.
func isNotFound(err error) bool { return errors.Is(err, catalog.ErrNotFound) }

func asUnwritten(err error) (unwritten, bool) { return errors.AsType[unwritten](err) }

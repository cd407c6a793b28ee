package shim

import "errors"

var (
	// ErrGone says that the shim's process has ended.
	ErrGone = errors.New("the shim has ended")
	// ErrProtocol says that the shim speaks a protocol that this build does not.
	ErrProtocol = errors.New("the shim speaks another protocol")
)

// Error returns the message.
func (e *Error) Error() string { return e.Message }

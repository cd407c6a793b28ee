// Package blob stands in for the real one.
package blob

import "errors"

var ErrNoSpace = errors.New("no space")

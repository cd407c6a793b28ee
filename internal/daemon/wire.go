package daemon

import (
	"context"
	"errors"

	"github.com/hibernacle/hibernacle/api"
)

// wire builds the core.
func wire(context.Context, Config, Folders, Account) (core, api.Version, error) {
	return nil, api.Version{}, errors.New("not wired yet")
}

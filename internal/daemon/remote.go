package daemon

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/hibernacle/hibernacle/internal/blob/disk"
	"github.com/hibernacle/hibernacle/internal/blob/s3"
	"github.com/hibernacle/hibernacle/internal/blob/wrap"
	"github.com/hibernacle/hibernacle/internal/tier"
)

// The variables with credentials that may only read the remote store: shims get
// these, since a shim holds a hostile guest.
const (
	readKeyEnv    = "HIB_STORE_READ_ACCESS_KEY_ID"
	readSecretEnv = "HIB_STORE_READ_SECRET_ACCESS_KEY"
)

// openTier opens the remote store beside the local one, and returns what shims
// read it with. Both are nil if there is none.
func openTier(ctx context.Context, c Config, f Folders, local *disk.Store) (*tier.Tier, *s3.Config, error) {
	if c.Store == "" {
		return nil, nil, nil
	}
	full, err := s3.ParseURL(c.Store)
	if err != nil {
		return nil, nil, err
	}
	read, err := readOnly(full, os.Getenv)
	if err != nil {
		return nil, nil, err
	}
	if read.AccessKey == full.AccessKey {
		c.Log.Warn("shims get the daemon's own credentials for the remote store; set "+readKeyEnv+" and "+readSecretEnv+" to some that may only read",
			"store", full)
	}
	remote, err := s3.Open(ctx, full)
	if err != nil {
		return nil, nil, err
	}
	node, err := f.node()
	if err != nil {
		return nil, nil, err
	}
	t, err := tier.New(ctx, tier.Config{
		Local: local, Remote: wrap.Retry(remote, wrap.Policy{}), Where: full.String(), Node: node, Budget: c.LocalBudget, Log: c.Log,
	})
	return t, &read, err
}

// readOnly returns cfg with the credentials for reading, if env has any.
func readOnly(cfg s3.Config, env func(string) string) (s3.Config, error) {
	key, secret := env(readKeyEnv), env(readSecretEnv)
	if (key == "") != (secret == "") {
		return s3.Config{}, fmt.Errorf("%s and %s belong together: set both or neither", readKeyEnv, readSecretEnv)
	}
	if key != "" {
		cfg.AccessKey, cfg.SecretKey, cfg.SessionToken = key, secret, ""
	}
	return cfg, nil
}

var nodeForm = regexp.MustCompile(`^[0-9a-f]{16,64}$`)

// node reads the id of this data folder, by which a remote store knows whose it
// is, and makes one at the first start.
func (f Folders) node() (string, error) {
	path := filepath.Join(f.Data, "node.id")
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		random := make([]byte, 16)
		rand.Read(random) // never fails
		id := hex.EncodeToString(random)
		return id, writeFile(path, 0o600, []byte(id+"\n"))
	}
	if err != nil {
		return "", fmt.Errorf("read the node's id: %w", err)
	}
	id := strings.TrimSpace(string(b))
	if !nodeForm.MatchString(id) {
		return "", fmt.Errorf("%s holds no id of a node (16 to 64 hexadecimal digits): restore it, or delete it and take the remote store over with hib store import --take-over", path)
	}
	return id, nil
}

package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/hibernacle/hibernacle/api"
)

// Environment variables that say which daemon to speak to.
const (
	EnvURL  = "HIB_API_URL" // URL of the daemon
	EnvKey  = "HIB_API_KEY" // API key
	EnvData = "HIB_DATA"    // the daemon's data folder, on this host
)

// Options say which daemon to speak to. What is empty is found out.
type Options struct {
	URL  string // default: that of the daemon of the data folder
	Key  string // default: that of the data folder, for a daemon on this host
	Data string // data folder, default DataFolder()
}

// FromEnv returns a client as the environment variables say. Without any it
// speaks to the daemon of the default data folder.
func FromEnv() (*Client, error) {
	return Options{URL: os.Getenv(EnvURL), Key: os.Getenv(EnvKey)}.Client()
}

// Client returns a client as the options say.
func (o Options) Client() (*Client, error) {
	data := o.Data
	if data == "" {
		var err error
		if data, err = DataFolder(); err != nil && (o.URL == "" || o.Key == "") {
			return nil, err
		}
	}
	rawURL := o.URL
	if rawURL == "" {
		rawURL = daemonURL(data)
	}
	key := o.Key
	if key == "" {
		if o.URL != "" && !loopback(o.URL) { // a folder's key is sent to its own daemon only
			return nil, fmt.Errorf("no API key for %s: set %s", rawURL, EnvKey)
		}
		var err error
		if key, err = readKey(data); err != nil {
			return nil, err
		}
	}
	return New(rawURL, key)
}

// DataFolder returns the daemon's data folder: $HIB_DATA, or
// /var/lib/hibernacle for root, or hibernacle in the user's data folder.
func DataFolder() (string, error) {
	if d := os.Getenv(EnvData); d != "" {
		return filepath.Abs(d)
	}
	if os.Geteuid() == 0 {
		return "/var/lib/hibernacle", nil
	}
	if d := os.Getenv("XDG_DATA_HOME"); filepath.IsAbs(d) {
		return filepath.Join(d, "hibernacle"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("find the data folder: %w; set %s", err, EnvData)
	}
	return filepath.Join(home, ".local", "share", "hibernacle"), nil
}

// daemonURL returns where the daemon of a data folder listens, as far as that
// is known.
func daemonURL(data string) string {
	var info api.DaemonInfo
	b, err := os.ReadFile(filepath.Join(data, api.DaemonFile))
	if err == nil && json.Unmarshal(b, &info) == nil && info.URL != "" {
		return info.URL
	}
	return api.DefaultURL
}

// loopback tells whether a URL leads to this host.
func loopback(rawURL string) bool {
	u, err := url.Parse(rawURL)
	if err != nil {
		return false
	}
	ip := net.ParseIP(u.Hostname())
	return u.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
}

func readKey(data string) (string, error) {
	path := filepath.Join(data, api.KeyFile)
	b, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("%w: there is no key at %s, so none has run here", ErrUnreachable, path)
	case err != nil:
		return "", fmt.Errorf("read the API key: %w; set %s", err, EnvKey)
	}
	return strings.TrimSpace(string(b)), nil
}

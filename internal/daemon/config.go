// Package daemon runs the daemon: it prepares the data folder and the runtime
// folder, wires store, catalog, core and server together, and serves until it
// is told to stop. Guests go on without it.
//
// The data folder holds all that is kept; one daemon at a time owns it. The
// runtime folder holds what belongs to processes that run: sockets, mounts,
// consoles. The account is the unprivileged user that shims and VMMs run as
// when the daemon is root.
package daemon

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"

	"github.com/hibernacle/hibernacle/internal/blob/s3"
)

// Formats of the log.
const (
	LogText = "text"
	LogJSON = "json"
)

// Config is what a daemon is started with.
type Config struct {
	Data         string       // data folder, made if it is missing
	Listen       string       // TCP address, port 0 takes a free one
	Domain       string       // of the hosts that name ports of sandboxes, see parseDomain; "" is proxy.DefaultDomain
	User         string       // account for shims and VMMs; "" is the default one (see Account)
	Accel        string       // "kvm", "tcg" or "" for what the host has
	CPUModel     string       // named CPU model of the guests, "" for the default
	Cache        string       // folder for what template builds download; "" is one in the data folder
	GuestMemory  int64        // bytes that may be promised to guests that run; 0 is what the host has without a reserve, NoLimit any
	ParkedMemory int64        // bytes that parked machines may take up; 0 is an eighth of the host's memory, NoParking none
	Pool         int          // machines that are kept ready for the next start
	DiskReserve  int          // percent of the RAM of guests that run; so much of the disk is kept free for their hibernations
	Store        string       // address of the remote store, see s3.ParseURL; "": none
	LocalBudget  int64        // bytes that packs may take up on the local disk once they are in the remote store too; 0: no limit
	MetricsOpen  bool         // /metrics needs no key
	Resolvers    []string     // DNS servers ("address:port") that answer sandboxes; none: those of the host
	WrapVMM      []string     // command that the VMM is started by, for tests
	Version      string       // of this build
	Program      string       // this program's file, which shims are started from
	Log          *slog.Logger // must be set
}

// NoLimit is the Config.GuestMemory that promises guests whatever they ask for.
const NoLimit = -1

// NoParking is the Config.ParkedMemory that has every machine end with its hibernation.
const NoParking = -1

// maxPool bounds the machines that are kept ready.
const maxPool = 64

// NewLog returns a logger for the daemon that writes lines of the format
// LogText or LogJSON.
func NewLog(w io.Writer, format string, level slog.Level) (*slog.Logger, error) {
	o := &slog.HandlerOptions{Level: level}
	switch format {
	case LogText, "":
		return slog.New(slog.NewTextHandler(w, o)), nil
	case LogJSON:
		return slog.New(slog.NewJSONHandler(w, o)), nil
	}
	return nil, fmt.Errorf("log format %q: it must be %s or %s", format, LogText, LogJSON)
}

// check refuses what can't work.
func (c Config) check() error {
	if c.Data == "" {
		return errors.New("the data folder is not given")
	}
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		return fmt.Errorf("listen address %q: %w; it must be of the form HOST:PORT", c.Listen, err)
	}
	if _, err := parseDomain(c.Domain, nil); err != nil {
		return err
	}
	switch c.Accel {
	case "", "kvm", "tcg":
	default:
		return fmt.Errorf("accelerator %q: it must be kvm or tcg", c.Accel)
	}
	if c.Pool < 0 || c.Pool > maxPool {
		return fmt.Errorf("a pool of %d machines: it must be 0 to %d", c.Pool, maxPool)
	}
	if c.Store != "" {
		if _, err := s3.ParseURL(c.Store); err != nil {
			return err
		}
	}
	if c.LocalBudget < 0 || c.LocalBudget > 0 && c.Store == "" {
		return fmt.Errorf("a budget of %d bytes for the local disk needs a remote store (--store), which keeps what is evicted", c.LocalBudget)
	}
	if c.DiskReserve < 0 || c.DiskReserve > 100 {
		return fmt.Errorf("disk reserve of %d percent: it must be 0 to 100", c.DiskReserve)
	}
	return nil
}

package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/proxy"
	"github.com/hibernacle/hibernacle/internal/server"
)

// shutdownPatience is how long requests under way may go on after the order to
// stop.
const shutdownPatience = 10 * time.Second

// Started says where a daemon can be reached.
type Started struct {
	URL       string
	KeyFile   string
	Account   Account
	Plain     bool // reachable from other hosts, without encryption
	Templates int  // how many there are
}

// core is what the wiring returns: the core, and how to let go of it.
type core interface {
	server.Core
	proxy.Core
	observed() *observers // nil: nobody is told of what happens
	Close() error         // leaves the guests running
}

// wiring builds the core and says what VMM it uses.
type wiring func(ctx context.Context, c Config, f Folders, a Account) (core, api.Version, error)

// Run runs the daemon until ctx ends, and calls ready once it serves. It
// returns nil after an orderly stop.
func Run(ctx context.Context, c Config, ready func(Started)) error {
	return run(ctx, c, wire, ready)
}

func run(ctx context.Context, c Config, wire wiring, ready func(Started)) error {
	if err := c.check(); err != nil {
		return err
	}
	var err error
	if c.Data, err = filepath.Abs(c.Data); err != nil {
		return fmt.Errorf("data folder: %w", err)
	}
	account, err := LookupAccount(c.User)
	if err != nil {
		return err
	}
	f := FoldersOf(c.Data)
	if c.Cache != "" {
		f.Cache = c.Cache
	}
	if err := f.prepare(account); err != nil {
		return err
	}
	lock, err := f.lock()
	if err != nil {
		return err
	}
	defer lock.Close()
	defer os.Remove(f.Run) // fails, rightly, while machines run on
	key, err := f.key()
	if err != nil {
		return err
	}
	// Listening comes before the core: if the port is taken nothing was begun.
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", c.Listen)
	if err != nil {
		return fmt.Errorf("listen at %s: %w; choose another address with --listen", c.Listen, err)
	}
	defer ln.Close()
	warnOfFUSE(c.Log)
	core, version, err := wire(ctx, c, f, account)
	if err != nil {
		return err
	}
	at, err := parseDomain(c.Domain, ln.Addr())
	if err != nil {
		return errors.Join(err, core.Close())
	}
	ports := proxy.New(proxy.Config{Core: core, Key: key, Domain: at.domain, Log: c.Log})
	sc := server.Config{Core: core, Key: key, Version: version, PortURL: at.portURL(), Log: c.Log, MetricsOpen: c.MetricsOpen}
	core.observed().addTo(&sc)
	srv := server.New(sc)
	started := Started{
		URL: urlOf(ln.Addr()), KeyFile: filepath.Join(f.Data, api.KeyFile), Account: account, Plain: !isLoopback(ln.Addr()),
	}
	if ts, err := core.Templates(ctx); err == nil {
		started.Templates = len(ts)
	}
	err = f.announce(started.URL)
	if err == nil {
		defer f.withdraw()
		ready(started)
		err = serve(ctx, ln, srv, ports, c.Log)
	}
	srv.Close()
	ports.Close()
	return errors.Join(err, core.Close())
}

// warnOfFUSE says early what every sandbox would fail of later.
func warnOfFUSE(log *slog.Logger) {
	if err := unix.Access("/dev/fuse", unix.R_OK|unix.W_OK); err != nil {
		log.Warn("no sandbox can run here: /dev/fuse can't be opened. hib doctor says what to do", "err", err)
	}
}

// serve answers requests, those for ports of sandboxes by ports and the others
// by srv, until ctx ends; then it ends the listener and the streams and lets
// other requests come to their end.
func serve(ctx context.Context, ln net.Listener, srv *server.Server, ports *proxy.Proxy, log *slog.Logger) error {
	hs := server.NewHTTPServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if ports.Match(r) {
			ports.ServeHTTP(w, r)
			return
		}
		srv.ServeHTTP(w, r)
	}), log)
	failed := make(chan error, 1)
	go func() { failed <- hs.Serve(ln) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	log.Info("stopping, guests go on", "patience", shutdownPatience)
	patience, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownPatience)
	defer cancel()
	go srv.Close()
	go ports.Close()
	err := hs.Shutdown(patience)
	if errors.Is(err, context.DeadlineExceeded) {
		log.Warn("requests were broken off")
		err = hs.Close()
	}
	if served := <-failed; err == nil && !errors.Is(served, http.ErrServerClosed) {
		err = served
	}
	return err
}

// urlOf returns the URL for clients on this host.
func urlOf(addr net.Addr) string {
	host, port, err := net.SplitHostPort(addr.String())
	if err != nil {
		return "http://" + addr.String()
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "http://" + net.JoinHostPort(host, port)
}

func isLoopback(addr net.Addr) bool {
	tcp, ok := addr.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}

package guest

import (
	"context"
	"crypto/subtle"
	"errors"
	"log/slog"
	"math"
	"net"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/hibernacle/hibernacle/api/filesystem/filesystemconnect"
	"github.com/hibernacle/hibernacle/api/process/processconnect"
	"github.com/hibernacle/hibernacle/internal/guestapi"
)

const (
	maxMessage = 16 << 20 // bytes of one message to the services
	stallLimit = 5 * time.Second
	journalMax = 1 << 20 // bytes of output kept per process
)

// Config is what an Agent works with.
type Config struct {
	System System
	Log    *slog.Logger

	Hooks   string        // folder of the image's hooks; "" is /etc/hib/hooks
	Cgroups string        // where the cgroup file system is mounted; "": hooks get no cgroups
	Etc     string        // folder of passwd and group; "" is /etc
	Cgroup  int           // descriptor of the cgroup that processes start in; -1: the agent's own
	Stall   time.Duration // how long a client may read nothing of what waits for it; 0 is 5 s
	Journal int           // bytes of output kept per process; 0 is 1 MiB
}

// Agent serves one guest. It is made by New.
type Agent struct {
	cfg       Config
	control   *controller
	processes *processService
	files     *fileService
	watchers  *watchService
	metrics   *meter
	spawner   *spawner

	mu    sync.Mutex
	token string            // access token, "": open
	env   map[string]string // default environment
}

// New returns an agent. Nothing runs before it is served.
func New(cfg Config) *Agent {
	if cfg.Etc == "" {
		cfg.Etc = "/etc"
	}
	if cfg.Hooks == "" {
		cfg.Hooks = hooksDir
	}
	if cfg.Stall == 0 {
		cfg.Stall = stallLimit
	}
	if cfg.Journal == 0 {
		cfg.Journal = journalMax
	}
	a := &Agent{cfg: cfg, spawner: newSpawner(), metrics: newMeter("/proc", "/")}
	gate := newGate()
	hooks := &hookRunner{dir: cfg.Hooks, cages: newCages(cfg.Cgroups), spawner: a.spawner, accounts: a.accounts, env: a.environment, log: cfg.Log}
	a.control = newController(cfg.System, gate, hooks, cfg.Log, a.setIdentity)
	a.processes = &processService{
		table: newTable(), spawner: a.spawner, gate: gate, accounts: a.accounts, env: a.environment,
		cgroup: cfg.Cgroup, journal: cfg.Journal, stall: cfg.Stall,
	}
	a.files = &fileService{accounts: a.accounts}
	a.watchers = newWatchService(a.accounts, cfg.Stall)
	return a
}

func (a *Agent) accounts() (*accounts, error) { return loadAccounts(a.cfg.Etc) }

func (a *Agent) setIdentity(id *guestapi.Identity) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.token, a.env = id.AccessToken, id.Env
}

func (a *Agent) environment() map[string]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.env
}

func (a *Agent) accessToken() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.token
}

// filesystemService joins the two halves of the service: entries and watches.
type filesystemService struct {
	*fileService
	*watchService
}

// Handler returns the agent's HTTP interface.
func (a *Agent) Handler() http.Handler {
	mux := http.NewServeMux()
	a.control.register(mux)
	mux.HandleFunc("POST "+guestapi.AwakePath, a.awakeCall())
	mux.HandleFunc("GET "+guestapi.HealthPath, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
	})

	private := http.NewServeMux()
	options := []connect.HandlerOption{
		connect.WithReadMaxBytes(maxMessage),
		connect.WithCompressMinBytes(math.MaxInt32), // spares the guest's CPU and memory
	}
	private.Handle(processconnect.NewProcessHandler(a.processes, options...))
	private.Handle(filesystemconnect.NewFilesystemHandler(filesystemService{a.files, a.watchers}, options...))
	private.HandleFunc("GET /metrics", a.metrics.serve)
	private.HandleFunc("GET /envs", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, a.environmentOrEmpty()) })
	mux.Handle("/", a.requireToken(private))

	transfers := http.NewServeMux()
	transfers.HandleFunc("GET "+filesPath, a.files.download)
	transfers.HandleFunc("POST "+filesPath, a.files.upload)
	mux.Handle(filesPath, a.requireTokenOrSignature(transfers))
	return withWriter(mux)
}

func (a *Agent) environmentOrEmpty() map[string]string {
	if env := a.environment(); env != nil {
		return env
	}
	return map[string]string{}
}

// requireToken refuses requests without the access token.
func (a *Agent) requireToken(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if token := a.accessToken(); token != "" && !sameToken(r.Header.Get(guestapi.AccessHeader), token) {
			writeError(w, http.StatusUnauthorized, "the access token is missing or wrong: send it in "+guestapi.AccessHeader)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// requireTokenOrSignature refuses file transfers that have neither the access
// token nor a valid signature made with it.
func (a *Agent) requireTokenOrSignature(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token := a.accessToken()
		if token != "" && !sameToken(r.Header.Get(guestapi.AccessHeader), token) {
			if err := checkSignature(r, token, time.Now()); err != nil {
				writeError(w, http.StatusUnauthorized, err.Error())
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

// sameToken compares in a time that does not tell how much is right.
func sameToken(got, want string) bool {
	return subtle.ConstantTimeCompare([]byte(got), []byte(want)) == 1
}

// Serve serves the agent at l until ctx ends. Streams are not waited for.
func (a *Agent) Serve(ctx context.Context, l net.Listener) error {
	server := &http.Server{
		Handler:           a.Handler(),
		ReadHeaderTimeout: 30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(a.cfg.Log.Handler(), slog.LevelDebug),
	}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return ctx.Err()
}

// Package webhook delivers events to URLs.
//
// A hook is a URL with a filter, a secret and a cursor: the id of the last
// event that the URL took. Each hook has a worker of its own that reads the
// journal behind the cursor and posts one event at a time, in order, until it is
// taken (any 2xx). So delivery is at least once: after a crash some events come
// again, with the same id. An endpoint that does not take an event is tried
// again, ever more seldom, and after days the hook is paused until somebody
// resumes it. It costs one event of memory and one goroutine meanwhile, and
// holds up nobody.
//
// Each post is signed (see Sign). The secret is in the catalog and in the
// answer that made the hook, and nowhere else.
package webhook

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hibernacle/hibernacle/internal/catalog"
	"github.com/hibernacle/hibernacle/internal/events"
)

var (
	// ErrNotFound says that there is no such hook.
	ErrNotFound = errors.New("no such webhook")
	// ErrInvalid says that a hook cannot be as it is asked for.
	ErrInvalid = errors.New("invalid webhook")
)

// The headers of a post. The signature is "v1=" and what Sign returns.
const (
	HeaderID        = "Hib-Event-Id"
	HeaderType      = "Hib-Event-Type"
	HeaderTimestamp = "Hib-Timestamp" // seconds since 1970, of this attempt
	HeaderSignature = "Hib-Signature"
)

// TypeTest is the type of the event that Test posts. It is in no journal.
const TypeTest = "test"

// maxHooks bounds the hooks of a host.
const maxHooks = 100

// kind is that of the catalog's records.
const kind = "webhook"

// Catalog keeps the hooks; see package catalog.
type Catalog interface {
	List(ctx context.Context, kind string) ([]catalog.Record, error)
	Put(ctx context.Context, kind, key string, value []byte, ifRevision uint64) (uint64, error)
	Delete(ctx context.Context, kind, key string, ifRevision uint64) error
}

// Config is what a Manager is made of. Durations that are 0 are the usual ones.
type Config struct {
	Journal *events.Journal
	Catalog Catalog
	Types   []string           // those that a hook may ask for; nil: any
	Observe func(success bool) // is told of each delivery tried; may be nil
	Log     *slog.Logger       // nil: silent

	Timeout    time.Duration // of one post, 10 s
	FirstRetry time.Duration // 5 s, then twice as long each time
	MaxRetry   time.Duration // up to 1 h
	GiveUp     time.Duration // a hook that takes nothing for so long is paused, 3 days
	SaveEvery  time.Duration // how often a cursor that moved is written, 5 s
}

func (c *Config) setDefaults() {
	for d, v := range map[*time.Duration]time.Duration{
		&c.Timeout: 10 * time.Second, &c.FirstRetry: 5 * time.Second, &c.MaxRetry: time.Hour, &c.GiveUp: 72 * time.Hour, &c.SaveEvery: 5 * time.Second,
	} {
		if *d == 0 {
			*d = v
		}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Observe == nil {
		c.Observe = func(bool) {}
	}
}

// Spec says what a hook is to be.
type Spec struct {
	URL     string   // http or https, without user and password
	Sandbox string   // id or name, "": all
	Types   []string // of events, none: all
	Secret  string   // "": one is made
}

// The states of a hook.
const (
	StateActive   = "active"   // the last post was taken, or there was none
	StateRetrying = "retrying" // the last one was not; it is tried again
	StatePaused   = "paused"   // nothing was taken for so long that it is not tried any more
)

// Hook is a hook as others may see it: without its secret.
type Hook struct {
	ID        string
	URL       string
	Sandbox   string
	Types     []string
	CreatedAt time.Time
	State     string
	Cursor    uint64    // id of the last event that was delivered or passed over
	Failures  int       // attempts in a row that failed
	Error     string    // of the last attempt, "" after a success
	NextTry   time.Time // zero if none is due
}

// record is what the catalog keeps of a hook.
type record struct {
	Version   int       `json:"version"`
	URL       string    `json:"url"`
	Sandbox   string    `json:"sandbox,omitempty"`
	Types     []string  `json:"types,omitempty"`
	Secret    string    `json:"secret"`
	CreatedAt time.Time `json:"created_at"`
	Cursor    uint64    `json:"cursor"`
	Paused    bool      `json:"paused,omitempty"`
	Failing   time.Time `json:"failing,omitzero"` // since when nothing was taken
	Error     string    `json:"error,omitempty"`
}

// recordVersion is the version of record.
const recordVersion = 1

// Manager runs the hooks of a host. Its methods may be called at the same time.
type Manager struct {
	cfg    Config
	client *http.Client
	ctx    context.Context // of the workers
	cancel context.CancelFunc

	mu     sync.Mutex
	closed bool
	hooks  map[string]*hook
	work   sync.WaitGroup
}

// New returns a manager whose hooks are at work. Close it before the journal
// and the catalog.
func New(ctx context.Context, cfg Config) (*Manager, error) {
	cfg.setDefaults()
	m := &Manager{cfg: cfg, hooks: map[string]*hook{}, client: newClient(cfg.Timeout)}
	m.ctx, m.cancel = context.WithCancel(context.WithoutCancel(ctx))
	records, err := cfg.Catalog.List(ctx, kind)
	if err != nil {
		m.cancel()
		return nil, fmt.Errorf("load the webhooks: %w", err)
	}
	for _, r := range records {
		h := &hook{m: m, id: r.Key, revision: r.Revision}
		if err := json.Unmarshal(r.Value, &h.rec); err != nil || h.rec.Version != recordVersion {
			m.Close()
			return nil, fmt.Errorf("load webhook %s: its record is of version %d, this daemon reads %d (%w)", r.Key, h.rec.Version, recordVersion, err)
		}
		m.hooks[h.id] = h
	}
	for _, h := range m.hooks {
		m.start(h)
	}
	return m, nil
}

// newClient returns a client that follows no redirects: they would take what
// was signed for one place to another.
func newClient(timeout time.Duration) *http.Client {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.MaxIdleConnsPerHost, t.IdleConnTimeout = 1, 30*time.Second
	return &http.Client{
		Transport: t, Timeout: timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Close ends the workers and writes how far each came. Idempotent.
func (m *Manager) Close() {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.cancel()
	m.work.Wait()
	m.client.CloseIdleConnections()
}

// Add makes a hook for events from now on and returns it with its secret.
func (m *Manager) Add(ctx context.Context, s Spec) (Hook, string, error) {
	if err := m.check(s); err != nil {
		return Hook{}, "", err
	}
	if s.Secret == "" {
		s.Secret = "whsec_" + strings.ToLower(rand.Text())
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.hooks) >= maxHooks {
		return Hook{}, "", fmt.Errorf("%w: there are %d already, the most that there may be; remove one with hib webhook rm", ErrInvalid, maxHooks)
	}
	h := &hook{m: m, id: strings.ToLower(rand.Text()[:12]), rec: record{
		Version: recordVersion, URL: s.URL, Sandbox: s.Sandbox, Types: slices.Clone(s.Types), Secret: s.Secret,
		CreatedAt: time.Now().UTC(), Cursor: m.cfg.Journal.Last(),
	}}
	if err := h.save(ctx); err != nil {
		return Hook{}, "", err
	}
	m.hooks[h.id] = h
	m.start(h)
	return h.view(), s.Secret, nil
}

// secretForm is what a secret may be: long enough, and of characters that
// survive a header, a shell and an environment variable.
var secretForm = regexp.MustCompile(`^[!-~]{16,256}$`)

// maxURL bounds a hook's URL.
const maxURL = 2048

func (m *Manager) check(s Spec) error {
	u, err := url.Parse(s.URL)
	switch {
	case err != nil || len(s.URL) > maxURL || (u.Scheme != "http" && u.Scheme != "https") || u.Hostname() == "":
		return fmt.Errorf("%w: the URL must be of the form https://HOST/PATH", ErrInvalid)
	case u.User != nil:
		return fmt.Errorf("%w: the URL has a user or a password in it, which lists would show; check the signature instead", ErrInvalid)
	case u.Fragment != "":
		return fmt.Errorf("%w: the URL has a fragment (#…), which is never sent", ErrInvalid)
	case s.Secret != "" && !secretForm.MatchString(s.Secret):
		return fmt.Errorf("%w: a secret is of 16 to 256 visible ASCII characters", ErrInvalid)
	}
	for _, t := range s.Types {
		if m.cfg.Types != nil && !slices.Contains(m.cfg.Types, t) {
			return fmt.Errorf("%w: there are no events of type %.40q; the types are %s", ErrInvalid, t, strings.Join(m.cfg.Types, ", "))
		}
	}
	return nil
}

// List returns all hooks, the oldest first.
func (m *Manager) List() []Hook {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := make([]Hook, 0, len(m.hooks))
	for _, h := range m.hooks {
		list = append(list, h.view())
	}
	slices.SortFunc(list, func(a, b Hook) int {
		if n := a.CreatedAt.Compare(b.CreatedAt); n != 0 {
			return n
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list
}

// Remove deletes a hook. What is being posted at this moment is given up.
func (m *Manager) Remove(ctx context.Context, id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	h, err := m.find(id)
	if err != nil {
		return err
	}
	h.stop()
	if err := m.cfg.Catalog.Delete(ctx, kind, id, h.revision); err != nil && !errors.Is(err, catalog.ErrNotFound) {
		m.start(h)
		return fmt.Errorf("remove webhook %s: %w", id, err)
	}
	delete(m.hooks, id)
	return nil
}

// Resume lets a paused hook go on where it stopped, and has one that waits for
// its next attempt try at once.
func (m *Manager) Resume(ctx context.Context, id string) (Hook, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	h, err := m.find(id)
	if err != nil {
		return Hook{}, err
	}
	h.stop()
	h.mu.Lock()
	h.rec.Paused, h.rec.Failing, h.failures = false, time.Time{}, 0
	h.mu.Unlock()
	err = h.save(ctx)
	m.start(h)
	return h.view(), err
}

// Tested says how a test went.
type Tested struct {
	Status int // of HTTP, 0: no answer
	Time   time.Duration
	Error  string // why it was not taken, "" if it was
}

// Test posts an event of type TypeTest once, whatever the hook's filter and
// state.
func (m *Manager) Test(ctx context.Context, id string) (Tested, error) {
	m.mu.Lock()
	h, err := m.find(id)
	m.mu.Unlock()
	if err != nil {
		return Tested{}, err
	}
	begun := time.Now()
	status, err := h.post(ctx, events.Event{Time: begun.UTC(), Type: TypeTest, Data: json.RawMessage(`{}`)})
	t := Tested{Status: status, Time: time.Since(begun)}
	if err != nil {
		t.Error = clip(err.Error())
	}
	return t, nil
}

// find returns a hook. m.mu is held.
func (m *Manager) find(id string) (*hook, error) {
	if h := m.hooks[id]; h != nil {
		return h, nil
	}
	return nil, fmt.Errorf("%w: %.40s; hib webhook ls lists them", ErrNotFound, id)
}

// Sign returns the signature of a post: HMAC-SHA256 over "TIMESTAMP.BODY" with
// the hook's secret as the key, in lower-case hexadecimal digits.
func Sign(secret, timestamp string, body []byte) string {
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte(timestamp))
	mac.Write([]byte{'.'})
	mac.Write(body)
	return hex.EncodeToString(mac.Sum(nil))
}

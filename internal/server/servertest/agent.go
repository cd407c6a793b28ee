package servertest

import (
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/guest"
)

// NewAgent returns the real agent. Its only user, "user", is the one who runs
// the test, with the home folder home.
func NewAgent(t testing.TB, home string) http.Handler {
	etc := t.TempDir()
	for name, line := range map[string]string{
		"passwd": fmt.Sprintf("user:x:%d:%d::%s:/bin/sh\n", os.Getuid(), os.Getgid(), home),
		"group":  fmt.Sprintf("user:x:%d:\n", os.Getgid()),
	} {
		if err := os.WriteFile(filepath.Join(etc, name), []byte(line), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return guest.New(guest.Config{System: system{}, Log: slog.New(slog.DiscardHandler), Etc: etc, Cgroup: -1}).Handler()
}

// system is a guest.System that leaves this host as it is.
type system struct{}

func (system) SetClock(time.Time) error               { return nil }
func (system) AddEntropy([]byte) error                { return nil }
func (system) SetIdentity(_, _, _ string) error       { return nil }
func (system) RenewBootID() error                     { return nil }
func (system) DestroySockets(guest.Flow) (int, error) { return 0, nil }
func (system) Publish(uint64) error                   { return nil }
func (system) Freeze(time.Duration) error             { return nil }
func (system) Thaw() error                            { return nil }

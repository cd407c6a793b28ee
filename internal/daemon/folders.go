package daemon

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/atomicfile"
)

// Folders are where a daemon keeps things.
type Folders struct {
	Data      string // all that is kept
	Catalog   string // file of the catalog
	Store     string // snapshots and packs, owned by the account
	Templates string // artifacts of templates, readable by the account
	Logs      string // consoles of the guests, owned by the account
	Cache     string // what builds download; can be deleted
	Events    string // journal of what happened
	Run       string // runtime folder, short enough for socket paths
}

// FoldersOf returns the folders that belong to a data folder.
func FoldersOf(data string) Folders {
	return Folders{
		Data:      data,
		Catalog:   filepath.Join(data, "catalog.db"),
		Store:     filepath.Join(data, "store"),
		Templates: filepath.Join(data, "templates"),
		Logs:      filepath.Join(data, "logs"),
		Cache:     filepath.Join(data, "cache"),
		Events:    filepath.Join(data, "events"),
		Run:       runFolder(data),
	}
}

// runFolder returns the runtime folder of a data folder. Socket paths have
// room for about 100 bytes, so the data folder's path is not part of it.
func runFolder(data string) string {
	sum := sha256.Sum256([]byte(data))
	return filepath.Join(runBase(), hex.EncodeToString(sum[:4]))
}

// runBase is the folder of the runtime folders.
func runBase() string {
	if os.Geteuid() == 0 {
		return "/run/hibernacle"
	}
	if d := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(d) {
		return filepath.Join(d, "hibernacle")
	}
	return filepath.Join(os.TempDir(), "hibernacle-"+strconv.Itoa(os.Geteuid()))
}

// prepare makes the folders with the rights that the account needs: it owns
// the store and the logs, reads the templates, and passes the rest.
func (f Folders) prepare(a Account) error {
	outer := fs.FileMode(0o700)
	if a.UID != os.Geteuid() {
		outer = 0o711
	}
	if err := os.MkdirAll(f.Data, outer); err != nil {
		return fmt.Errorf("make the data folder: %w", err)
	}
	for _, d := range []struct {
		path     string
		mode     fs.FileMode
		uid, gid int
	}{
		{f.Data, outer, -1, -1},
		{f.Store, 0o700, a.UID, a.GID},
		{f.Templates, 0o750, -1, a.GID},
		{f.Logs, 0o700, a.UID, a.GID},
		{f.Cache, 0o700, -1, -1},
	} {
		if err := own(d.path, d.mode, d.uid, d.gid); err != nil {
			return err
		}
	}
	// Other users of the host may have put something at a path in /tmp.
	for _, d := range []string{filepath.Dir(f.Run), f.Run} {
		if err := makePrivate(d, outer); err != nil {
			return err
		}
	}
	return a.CheckReach(f.Data)
}

// own makes a folder if it is missing, and sets its mode and owner.
func own(dir string, mode fs.FileMode, uid, gid int) error {
	if err := os.Mkdir(dir, mode); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make a folder: %w", err)
	}
	if err := os.Chmod(dir, mode); err != nil {
		return fmt.Errorf("set a folder's mode: %w", err)
	}
	if os.Geteuid() == 0 {
		if err := os.Lchown(dir, uid, gid); err != nil {
			return fmt.Errorf("set a folder's owner: %w", err)
		}
	}
	return nil
}

// giveStore makes the account the owner of the store's folders, which the
// daemon made and only shims write to.
func (f Folders) giveStore(a Account) error {
	if os.Geteuid() != 0 {
		return nil
	}
	entries, err := os.ReadDir(f.Store)
	if err != nil {
		return fmt.Errorf("look at the store: %w", err)
	}
	for _, e := range entries {
		if err := os.Lchown(filepath.Join(f.Store, e.Name()), a.UID, a.GID); err != nil {
			return fmt.Errorf("give the store to its account: %w", err)
		}
	}
	return nil
}

// makePrivate makes a folder that nobody but the daemon writes to, and refuses
// one that was there before and belongs to somebody else.
func makePrivate(dir string, mode fs.FileMode) error {
	if err := os.Mkdir(dir, mode); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make the runtime folder: %w", err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("make the runtime folder: %w", err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || !ok || int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("the runtime folder %s is not a folder of user %d: remove it", dir, os.Geteuid())
	}
	if err := os.Chmod(dir, mode); err != nil {
		return fmt.Errorf("make the runtime folder: %w", err)
	}
	return nil
}

// lockGrace is how long a daemon that was killed may hold its data folder: a
// process that it was starting at that moment has the lock until it is one of its own.
const lockGrace = 2 * time.Second

// lock takes the data folder for this process until the file is closed.
func (f Folders) lock() (*os.File, error) {
	path := filepath.Join(f.Data, "daemon.lock")
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the data folder: %w", err)
	}
	err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	for end := time.Now().Add(lockGrace); errors.Is(err, unix.EWOULDBLOCK) && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
		err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		pid, _ := io.ReadAll(io.LimitReader(file, 20))
		file.Close()
		return nil, fmt.Errorf("the data folder %s is in use by the daemon with pid %s: stop that one, or choose another folder with --data",
			f.Data, strings.TrimSpace(string(pid)))
	}
	if err == nil {
		err = file.Truncate(0)
	}
	if err == nil {
		_, err = file.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("lock the data folder %s: %w", f.Data, err)
	}
	return file, nil
}

var keyForm = regexp.MustCompile(`^` + api.KeyPrefix + `[0-9a-f]+$`)

// minKey is the least length of a key that is taken, 64 bits of it random.
const minKey = len(api.KeyPrefix) + 16

// key reads the API key, and makes one at the first start.
func (f Folders) key() (string, error) {
	path := filepath.Join(f.Data, api.KeyFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		random := make([]byte, 20)
		rand.Read(random) // never fails
		key := api.KeyPrefix + hex.EncodeToString(random)
		return key, writeFile(path, 0o600, []byte(key+"\n"))
	}
	if err != nil {
		return "", fmt.Errorf("read the API key: %w", err)
	}
	key := strings.TrimSpace(string(b))
	if !keyForm.MatchString(key) || len(key) < minKey {
		return "", fmt.Errorf("%s holds no API key (%s and hexadecimal digits): delete it, and the next start makes a new one", path, api.KeyPrefix)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return "", fmt.Errorf("keep the API key private: %w", err)
	}
	return key, nil
}

// announce writes where this daemon listens, for clients of this host.
func (f Folders) announce(url string) error {
	b, err := json.Marshal(api.DaemonInfo{URL: url, PID: os.Getpid(), Run: f.Run})
	if err != nil {
		return err
	}
	return writeFile(filepath.Join(f.Data, api.DaemonFile), 0o600, append(b, '\n'))
}

// withdraw takes the announcement back.
func (f Folders) withdraw() { os.Remove(filepath.Join(f.Data, api.DaemonFile)) }

// writeFile replaces a file as a whole.
func writeFile(path string, mode fs.FileMode, content []byte) error {
	return atomicfile.Write(path, mode, func(w io.Writer) error {
		_, err := w.Write(content)
		return err
	})
}

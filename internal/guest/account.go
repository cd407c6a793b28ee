package guest

import (
	"bufio"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// defaultUser is the user of calls that name none. Guests without it use root.
const defaultUser = "user"

var errNoUser = errors.New("no such user in the sandbox")

// account is a user of the guest.
type account struct {
	Name   string
	UID    uint32
	GID    uint32
	Groups []uint32 // supplementary
	Home   string
	Shell  string
}

// accounts is what /etc/passwd and /etc/group say at one moment.
type accounts struct {
	users  []account
	groups []group
}

type group struct {
	name    string
	gid     uint32
	members []string
}

// loadAccounts reads the databases in the folder etc. Lines that make no
// sense are passed over: the user may write these files.
func loadAccounts(etc string) (*accounts, error) {
	a := &accounts{}
	err := eachRecord(filepath.Join(etc, "passwd"), 7, func(f []string) {
		uid, uerr := strconv.ParseUint(f[2], 10, 32)
		gid, gerr := strconv.ParseUint(f[3], 10, 32)
		if f[0] == "" || uerr != nil || gerr != nil {
			return
		}
		u := account{Name: f[0], UID: uint32(uid), GID: uint32(gid), Home: f[5], Shell: f[6]}
		if !filepath.IsAbs(u.Home) {
			u.Home = "/"
		}
		if u.Shell == "" {
			u.Shell = "/bin/sh"
		}
		a.users = append(a.users, u)
	})
	if err != nil {
		return nil, err
	}
	err = eachRecord(filepath.Join(etc, "group"), 4, func(f []string) {
		gid, err := strconv.ParseUint(f[2], 10, 32)
		if f[0] == "" || err != nil {
			return
		}
		a.groups = append(a.groups, group{name: f[0], gid: uint32(gid), members: strings.Split(f[3], ",")})
	})
	return a, err
}

// eachRecord calls fn with the fields of each line of a colon-separated
// database. A file that does not exist has no lines.
func eachRecord(path string, fields int, fn func([]string)) error {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if rec := strings.Split(lines.Text(), ":"); len(rec) == fields {
			fn(rec)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// find returns the account of a name. The name "" is the default user. root
// exists in every guest, whatever its files say.
func (a *accounts) find(name string) (account, error) {
	lookup := name
	if lookup == "" {
		lookup = defaultUser
	}
	for _, u := range a.users {
		if u.Name == lookup {
			u.Groups = a.groupsOf(u)
			return u, nil
		}
	}
	if name == "" {
		return a.find("root")
	}
	if name == "root" {
		return account{Name: "root", Home: "/", Shell: "/bin/sh"}, nil
	}
	return account{}, fmt.Errorf("user %q: %w", name, errNoUser)
}

func (a *accounts) groupsOf(u account) []uint32 {
	var gids []uint32
	for _, g := range a.groups {
		for _, m := range g.members {
			if m == u.Name && g.gid != u.GID {
				gids = append(gids, g.gid)
			}
		}
	}
	return gids
}

// userName returns the name of a user id, or the id in digits.
func (a *accounts) userName(uid uint32) string {
	for _, u := range a.users {
		if u.UID == uid {
			return u.Name
		}
	}
	return strconv.FormatUint(uint64(uid), 10)
}

// groupName returns the name of a group id, or the id in digits.
func (a *accounts) groupName(gid uint32) string {
	for _, g := range a.groups {
		if g.gid == gid {
			return g.name
		}
	}
	return strconv.FormatUint(uint64(gid), 10)
}

// resolve makes an absolute path of what a caller gave: "" is the home, ~ and
// relative paths lead from there.
func (u account) resolve(path string) (string, error) {
	if strings.ContainsRune(path, 0) {
		return "", fmt.Errorf("path %q holds a NUL byte", path)
	}
	switch {
	case path == "" || path == "~":
		return u.Home, nil
	case strings.HasPrefix(path, "~/"):
		return filepath.Join(u.Home, path[2:]), nil
	case strings.HasPrefix(path, "~"):
		return "", fmt.Errorf("path %q: the home of another user must be written in full", path)
	case filepath.IsAbs(path):
		return filepath.Clean(path), nil
	}
	return filepath.Join(u.Home, path), nil
}

// makeDirs makes path and its parents; what it makes belongs to u.
func (u account) makeDirs(path string) error {
	if info, err := os.Stat(path); err == nil {
		if !info.IsDir() {
			return fmt.Errorf("%s is not a folder", path)
		}
		return nil
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := u.makeDirs(filepath.Dir(path)); err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		return err
	}
	return os.Lchown(path, int(u.UID), int(u.GID))
}

// callerName returns the user whom a request's Authorization header names; SDKs
// send the name as Basic credentials without a password. "" is the default.
func callerName(h http.Header) (string, error) {
	auth := h.Get("Authorization")
	if auth == "" {
		return "", nil
	}
	encoded, ok := strings.CutPrefix(auth, "Basic ")
	if !ok {
		return "", nil // a proxy's or another scheme's: not ours to judge
	}
	raw, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return "", errors.New("the Authorization header is not valid Basic credentials")
	}
	name, _, _ := strings.Cut(string(raw), ":")
	return name, nil
}

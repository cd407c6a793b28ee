package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
)

// accounts are tried in this order when the daemon is root and was told no
// account.
var accounts = []string{"hibernacle", "nobody"}

// Account is the user that shims and VMMs run as.
type Account struct {
	Name   string
	UID    int
	GID    int
	Groups []int // all of them, GID too
}

// LookupAccount finds the account called name. For a daemon that is not root
// that can only be its own user, which "" stands for. For root "" is the first
// there is of hibernacle and nobody, and root itself is refused.
func LookupAccount(name string) (Account, error) {
	if os.Geteuid() != 0 {
		own, err := user.Current()
		if err != nil {
			return Account{}, fmt.Errorf("find the own user: %w", err)
		}
		if name != "" && name != own.Username {
			return Account{}, fmt.Errorf("account %s: only root can choose another account than its own (%s)", name, own.Username)
		}
		return newAccount(own)
	}
	names := accounts
	if name != "" {
		names = []string{name}
	}
	for _, n := range names {
		u, err := user.Lookup(n)
		if _, unknown := errors.AsType[user.UnknownUserError](err); unknown {
			continue
		}
		if err != nil {
			return Account{}, fmt.Errorf("account %s: %w", n, err)
		}
		a, err := newAccount(u)
		if err == nil && a.UID == 0 {
			err = fmt.Errorf("account %s is root: guests must run under an unprivileged one", n)
		}
		return a, err
	}
	return Account{}, fmt.Errorf("account %s does not exist: make one with: useradd --system --no-create-home %s", names[0], names[0])
}

func newAccount(u *user.User) (Account, error) {
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return Account{}, fmt.Errorf("account %s has no numeric id: %q", u.Username, u.Uid)
	}
	gid, err := strconv.Atoi(u.Gid)
	if err != nil {
		return Account{}, fmt.Errorf("account %s has no numeric group: %q", u.Username, u.Gid)
	}
	a := Account{Name: u.Username, UID: uid, GID: gid, Groups: []int{gid}}
	ids, err := u.GroupIds()
	if err != nil {
		ids = nil // a system without a group file: the main group will do
	}
	for _, s := range ids {
		if g, err := strconv.Atoi(s); err == nil && !slices.Contains(a.Groups, g) {
			a.Groups = append(a.Groups, g)
		}
	}
	// Root gives the account what VMMs need it for, whether or not it is a
	// member of that group.
	if g, ok := kvmGroup(); ok && os.Geteuid() == 0 && !slices.Contains(a.Groups, g) {
		a.Groups = append(a.Groups, g)
	}
	return a, nil
}

// kvmGroup returns the group that may use /dev/kvm, if it is not root's.
func kvmGroup() (gid int, ok bool) {
	info, err := os.Stat("/dev/kvm")
	if err != nil || info.Mode().Perm()&0o060 != 0o060 {
		return 0, false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	return int(st.Gid), ok && st.Gid != 0
}

// CheckReach returns an error that says what to do if the account can't enter
// the folder dir, or one of those above it that exist.
func (a Account) CheckReach(dir string) error {
	if a.UID == os.Geteuid() {
		return nil
	}
	for d := filepath.Clean(dir); ; d = filepath.Dir(d) {
		info, err := os.Stat(d)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return err
		case !a.mayEnter(info):
			return fmt.Errorf("the account %s can't enter %s (mode %04o), which leads to %s: allow it with: chmod o+x %s, or choose another folder",
				a.Name, d, info.Mode().Perm(), dir, d)
		}
		if d == filepath.Dir(d) {
			return nil
		}
	}
}

// mayEnter tells whether the account has the right to pass a folder.
func (a Account) mayEnter(info fs.FileInfo) bool {
	perm := info.Mode().Perm()
	st, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !ok:
		return true
	case int(st.Uid) == a.UID:
		return perm&0o100 != 0
	case slices.Contains(a.Groups, int(st.Gid)):
		return perm&0o010 != 0
	}
	return perm&0o001 != 0
}

package guest

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestHostsKeepOthersLines(t *testing.T) {
	const managed = "127.0.1.1 new\n192.168.127.254 host.hib.internal\n"
	for _, c := range []struct{ old, want string }{
		{"", "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n" + managed},
		{"127.0.0.1 localhost\n127.0.1.1 old\n10.1.2.3 db # mine", "127.0.0.1 localhost\n10.1.2.3 db # mine\n" + managed},
	} {
		got := mergeHosts(c.old, "new")
		if got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
		if again := mergeHosts(got, "new"); again != got {
			t.Errorf("a second time: %q", again)
		}
	}
}

func TestNetworkOfTheCommandLine(t *testing.T) {
	custom := network{netip.MustParsePrefix("10.0.2.15/24"), netip.MustParseAddr("10.0.2.2"), 1500}
	for _, c := range []struct {
		cmdline string
		want    network
	}{
		{"console=ttyS0 quiet", defaultNetwork},
		{"hib.ip=10.0.2.15/24 hib.gw=10.0.2.2 hib.mtu=1500\n", custom},
		{"hib.ip=10.0.2.15 hib.gw=::1 hib.mtu=9 hib.mtu=99999 hib.ip", defaultNetwork},
	} {
		if got := parseNetwork(c.cmdline); got != c.want {
			t.Errorf("%s: got %+v", c.cmdline, got)
		}
	}
}

func TestAccountsAreLookedUp(t *testing.T) {
	etc := t.TempDir()
	load := func(passwd, group string) *accounts {
		writeFile(t, filepath.Join(etc, "passwd"), passwd)
		writeFile(t, filepath.Join(etc, "group"), group)
		a, err := loadAccounts(etc)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	a := load("user:x:1000:1000::relative:\nbad:x:-1:0::/:\n", "user:x:1000:\nsudo:x:27:user\n")
	u, err := a.find("")
	if err != nil || u.Name != "user" || u.Home != "/" || u.Shell != "/bin/sh" || len(u.Groups) != 1 || u.Groups[0] != 27 {
		t.Errorf("%+v, %v", u, err)
	}
	if _, err := a.find("bad"); err == nil {
		t.Error("a broken line became an account")
	}
	if u, err := a.find("root"); err != nil || u.UID != 0 {
		t.Errorf("root: %+v, %v", u, err)
	}
	if a.userName(7) != "7" || a.groupName(27) != "sudo" {
		t.Error("names")
	}
	for _, name := range []string{"passwd", "group"} {
		if err := os.Remove(filepath.Join(etc, name)); err != nil {
			t.Fatal(err)
		}
	}
	none, err := loadAccounts(etc)
	if err != nil {
		t.Fatal(err)
	}
	if u, err := none.find(""); err != nil || u.Name != "root" {
		t.Errorf("without databases the default is %+v, %v", u, err)
	}
}

func FuzzLoadAccounts(f *testing.F) {
	f.Add("user:x:1000:1000::/home/user:/bin/sh\n", "sudo:x:27:user,,x\n")
	f.Add("::::::\n:::::::::\n", ":::\n")
	f.Fuzz(func(t *testing.T, passwd, group string) {
		etc := t.TempDir()
		writeFile(t, filepath.Join(etc, "passwd"), passwd)
		writeFile(t, filepath.Join(etc, "group"), group)
		a, err := loadAccounts(etc)
		if err != nil {
			return
		}
		for _, u := range a.users {
			found, err := a.find(u.Name)
			if err != nil || !filepath.IsAbs(found.Home) {
				t.Errorf("%+v: %+v, %v", u, found, err)
			}
			path, err := found.resolve("x")
			if err != nil || !strings.HasPrefix(path, "/") {
				t.Errorf("%q, %v", path, err)
			}
		}
	})
}

func FuzzMergeHosts(f *testing.F) {
	f.Add("127.0.0.1 localhost\n127.0.1.1 old\n")
	f.Fuzz(func(t *testing.T, old string) {
		once := mergeHosts(old, "name")
		if twice := mergeHosts(once, "name"); twice != once {
			t.Errorf("%q became %q", once, twice)
		}
	})
}

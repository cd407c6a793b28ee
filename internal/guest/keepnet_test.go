package guest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestTheNetworkIsKept takes a card down in a network namespace of the test's own.
func TestTheNetworkIsKept(t *testing.T) {
	ip, ipErr := exec.LookPath("ip")
	nsenter, enterErr := exec.LookPath("nsenter")
	if os.Getuid() != 0 || ipErr != nil || enterErr != nil {
		t.Skip("a network namespace needs root, ip and nsenter")
	}
	n := network{netip.MustParsePrefix("192.168.127.2/24"), netip.MustParseAddr("192.168.127.1"), 1500}
	ctx, cancel := context.WithCancel(context.Background())
	namespace, kept := make(chan string, 1), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread stays in the namespace and ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = exec.Command(ip, "link", "add", "card", "type", "bridge").Run()
		}
		if err != nil {
			close(namespace)
			kept <- err
			return
		}
		if err := n.repair(); err != nil {
			t.Error(err)
		}
		namespace <- fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
		kept <- n.keep(ctx, slog.New(slog.DiscardHandler))
	}()
	in, ok := <-namespace
	if !ok {
		cancel()
		t.Skipf("no card in a network namespace: %v", <-kept)
	}
	run := func(args ...string) string {
		out, err := exec.Command(nsenter, append([]string{"--net=" + in, ip}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
		return string(out)
	}
	whole := func() bool {
		return strings.Contains(run("link", "show", "card"), ",UP") &&
			strings.Contains(run("route", "get", "192.168.127.1"), "src 192.168.127.2") &&
			strings.Contains(run("route", "get", "8.8.8.8"), "via 192.168.127.1") &&
			strings.Contains(run("route", "show", "table", "local"), "local 192.168.127.2")
	}
	waitFor(t, "the network", whole)
	for _, damage := range []string{
		"link set card down", "addr flush dev card", "route flush table main", "route del local 192.168.127.2 table local", "link set lo down",
	} {
		run(strings.Fields(damage)...)
		waitFor(t, "the network after ip "+damage, func() bool {
			return routed(exec.Command(nsenter, "--net="+in, ip, "route", "get", "8.8.8.8")) && whole()
		})
	}
	run("route", "replace", "default", "dev", "card") // not the agent's, but one
	run("route", "del", "192.168.127.0/24")
	waitFor(t, "the network's route", func() bool { return strings.Contains(run("route"), "192.168.127.0/24") })
	if got := run("route", "show", "default"); strings.Contains(got, "via") {
		t.Errorf("the default route that a user made was replaced: %s", got)
	}
	cancel()
	// The wait ends with the next message.
	run("link", "set", "card", "mtu", "1400")
	if err := <-kept; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func routed(cmd *exec.Cmd) bool { return cmd.Run() == nil }

func TestWhatIsALoss(t *testing.T) {
	link := func(index int32, flags uint32) []byte {
		return append([]byte(nil), wire(&unix.IfInfomsg{Index: index, Flags: flags})...)
	}
	address := func(index uint32) []byte {
		return append([]byte(nil), wire(&unix.IfAddrmsg{Index: index})...)
	}
	for name, c := range map[string]struct {
		kind uint16
		data []byte
		want bool
	}{
		"the card is down":     {unix.RTM_NEWLINK, link(2, 0), true},
		"loopback is down":     {unix.RTM_NEWLINK, link(1, 0), true},
		"another card is down": {unix.RTM_NEWLINK, link(3, 0), false},
		"the card is up":       {unix.RTM_NEWLINK, link(2, unix.IFF_UP), false},
		"its address is gone":  {unix.RTM_DELADDR, address(2), true},
		"another address":      {unix.RTM_DELADDR, address(3), false},
		"a route is gone":      {unix.RTM_DELROUTE, nil, true},
		"a route is new":       {unix.RTM_NEWROUTE, nil, false},
		"cut":                  {unix.RTM_NEWLINK, []byte{1, 2}, false},
	} {
		m := syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: c.kind}, Data: c.data}
		if got := isLoss(m, 2); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

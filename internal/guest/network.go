package guest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/guestapi"
)

// network is how the guest is addressed. Every sandbox has a network of its
// own, so all have the same addresses.
type network struct {
	address netip.Prefix
	gateway netip.Addr
	mtu     uint32
}

var defaultNetwork = network{
	address: netip.MustParsePrefix("192.168.127.2/24"),
	gateway: netip.MustParseAddr("192.168.127.1"),
	mtu:     65000,
}

// readNetwork returns what the kernel's command line says, and the default
// where it says nothing.
func readNetwork() network {
	cmdline, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return defaultNetwork
	}
	return parseNetwork(string(cmdline))
}

// parseNetwork reads hib.ip=ADDRESS/BITS, hib.gw=ADDRESS and hib.mtu=BYTES.
// Words that make no sense are passed over.
func parseNetwork(cmdline string) network {
	n := defaultNetwork
	for _, word := range strings.Fields(cmdline) {
		key, value, _ := strings.Cut(word, "=")
		switch key {
		case "hib.ip":
			if p, err := netip.ParsePrefix(value); err == nil && p.Addr().Is4() {
				n.address = p
			}
		case "hib.gw":
			if a, err := netip.ParseAddr(value); err == nil && a.Is4() {
				n.gateway = a
			}
		case "hib.mtu":
			if mtu, err := strconv.ParseUint(value, 10, 16); err == nil && mtu >= 576 {
				n.mtu = uint32(mtu)
			}
		}
	}
	return n
}

// up sets up loopback, the card and name resolution.
func (n network) up() error {
	s, err := openNetlink(0) // NETLINK_ROUTE
	if err != nil {
		return err
	}
	defer s.close()
	return errors.Join(bringLoopbackUp(s), n.configureCard(s), n.writeFiles())
}

func bringLoopbackUp(s *netlinkSocket) error {
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		return err
	}
	return bringUp(s, lo.Index, 0)
}

func (n network) configureCard(s *netlinkSocket) error {
	card, err := findCard()
	if err != nil {
		return err
	}
	if err := bringUp(s, card.Index, n.mtu); err != nil {
		return fmt.Errorf("bring %s up: %w", card.Name, err)
	}
	if err := addAddress(s, card.Index, n.address); err != nil {
		return fmt.Errorf("give %s the address %v: %w", card.Name, n.address, err)
	}
	own := netip.PrefixFrom(n.address.Addr(), 32)
	err = errors.Join(
		addRoute(s, card.Index, unix.RT_TABLE_LOCAL, unix.RT_SCOPE_HOST, unix.RTN_LOCAL, own, n.address.Addr()),
		addRoute(s, card.Index, unix.RT_TABLE_MAIN, unix.RT_SCOPE_LINK, unix.RTN_UNICAST, n.address, n.address.Addr()),
	)
	if err != nil {
		return fmt.Errorf("route to %v over %s: %w", n.address.Masked(), card.Name, err)
	}
	if err := addDefaultRoute(s, n.gateway); err != nil {
		return fmt.Errorf("route to %v: %w", n.gateway, err)
	}
	return nil
}

// findCard returns the one network card. Its driver may still be at work.
func findCard() (*net.Interface, error) {
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		all, err := net.Interfaces()
		if err != nil {
			return nil, err
		}
		for _, card := range all {
			if card.Flags&net.FlagLoopback == 0 && len(card.HardwareAddr) == 6 {
				return &card, nil
			}
		}
		if time.Now().After(end) {
			return nil, errors.New("there is no network card")
		}
	}
}

func (n network) writeFiles() error {
	if err := os.MkdirAll("/etc", 0o755); err != nil {
		return err
	}
	return errors.Join(
		replaceFile("/etc/resolv.conf", "nameserver "+n.gateway.String()+"\n"),
		replaceFile("/etc/hostname", "hib\n"),
		writeHosts("/etc/hosts", "hib"),
	)
}

// listen opens the agent's port. Keep-alive probes are few: each changes pages.
func listen(ctx context.Context) (net.Listener, error) {
	config := net.ListenConfig{KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: time.Minute, Interval: 15 * time.Second, Count: 4,
	}}
	config.SetMultipathTCP(false) // Go's default; nobody speaks it with the agent, and it is more code at each connection
	return config.Listen(ctx, "tcp4", ":"+strconv.Itoa(guestapi.Port))
}

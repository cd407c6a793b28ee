package vnet

import (
	"encoding/binary"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"
)

// hostAddressesAge is how long the host's addresses are believed.
const hostAddressesAge = 5 * time.Second

// hostAddresses knows the addresses of the host's interfaces and the broadcast
// addresses of their networks.
type hostAddresses struct {
	log        *slog.Logger
	interfaces func() ([]net.Addr, error)

	mu   sync.Mutex
	set  map[netip.Addr]struct{}
	read time.Time
}

func newHostAddresses(interfaces func() ([]net.Addr, error), log *slog.Logger) *hostAddresses {
	return &hostAddresses{log: log, interfaces: interfaces}
}

// contains says whether an address is the host's. When the host's addresses
// cannot be read, every address counts as one: nothing is dialled blindly.
func (h *hostAddresses) contains(a netip.Addr) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.set == nil || time.Since(h.read) > hostAddressesAge {
		set, err := h.load()
		if err != nil {
			h.log.Error("outbound flows are denied: the host's addresses cannot be read", "error", err)
			h.set = nil
			return true
		}
		h.set, h.read = set, time.Now()
	}
	_, ok := h.set[a]
	return ok
}

func (h *hostAddresses) load() (map[netip.Addr]struct{}, error) {
	addrs, err := h.interfaces()
	if err != nil {
		return nil, err
	}
	set := make(map[netip.Addr]struct{})
	for _, a := range addrs {
		addHostAddress(set, a)
	}
	return set, nil
}

func addHostAddress(set map[netip.Addr]struct{}, a net.Addr) {
	network, ok := a.(*net.IPNet)
	if !ok {
		return
	}
	ip4, mask := network.IP.To4(), network.Mask
	if ip4 == nil || len(mask) != net.IPv4len {
		return
	}
	set[netip.AddrFrom4([4]byte(ip4))] = struct{}{}
	if ones, _ := mask.Size(); ones < 31 {
		var broadcast [4]byte
		binary.BigEndian.PutUint32(broadcast[:], binary.BigEndian.Uint32(ip4)|^binary.BigEndian.Uint32(mask))
		set[netip.AddrFrom4(broadcast)] = struct{}{}
	}
}

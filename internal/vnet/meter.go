package vnet

import (
	"sync/atomic"
	"time"
)

// Activity says how busy a network is, for the judgement whether its sandbox is
// idle. Connections of DialControl, DNS, ARP and ICMP do not count.
type Activity struct {
	Open     int       // inbound connections that Dial returned and nobody closed yet
	Outbound int       // open outbound flows; an open one alone is no traffic
	Bytes    int64     // payload of inbound and outbound flows, both ways, since New
	Last     time.Time // of the last payload, Dial or close of an inbound connection; New at first
}

// meter counts payload.
type meter struct {
	bytes atomic.Int64
	last  atomic.Int64 // unix nanoseconds
	open  atomic.Int64
}

func (m *meter) add(n int) {
	m.bytes.Add(int64(n))
	m.touch()
}

func (m *meter) touch() { m.last.Store(time.Now().UnixNano()) }

// Activity returns the present figures.
func (n *Network) Activity() Activity {
	return Activity{
		Open:     int(n.meter.open.Load()),
		Outbound: n.flows.outbound(),
		Bytes:    n.meter.bytes.Load(),
		Last:     time.Unix(0, n.meter.last.Load()),
	}
}

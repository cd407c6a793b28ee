package vnet

import (
	"sync"
	"sync/atomic"
	"time"
)

// Activity says how busy a network is, for the judgement whether its sandbox is
// idle. Connections of DialControl, DNS, ARP and ICMP do not count.
type Activity struct {
	Open     int           // connections of Dial that are open and were not silent for longer than the inbound cap
	Awaiting int           // outbound flows whose guest waits for a reply, for less than the await cap
	Inbound  int           // all open connections of Dial
	Outbound int           // all open outbound flows; an open one alone is no traffic
	Bytes    int64         // payload of inbound and outbound flows, both ways, since New
	Idle     time.Duration // since the last payload, Touch, Dial, or end of a connection of Dial or of a flow that awaited a reply; since New at first
	Held     time.Duration // until none of those that are Open or Awaiting counts any more, if nothing passes
}

// Activity returns the present figures. It looks at every open flow.
//
// A connection of Dial counts as open until no byte passed it, either way, for
// inboundCap; its dial counts as a byte. An outbound flow awaits a reply while
// the guest was the last to send payload, for at most awaitCap from the end of
// what it sent; see usage for what is a reply.
func (n *Network) Activity(inboundCap, awaitCap time.Duration) Activity {
	a := Activity{Bytes: n.meter.bytes.Load()}
	for _, fl := range n.flows.all() {
		switch fl.kind {
		case flowInbound:
			a.Inbound++
			if left := inboundCap - fl.usage.silence(); left > 0 {
				a.Open++
				a.Held = max(a.Held, left)
			}
		case flowTCP, flowUDP:
			a.Outbound++
			if left := fl.usage.awaits(awaitCap); left > 0 {
				a.Awaiting++
				a.Held = max(a.Held, left)
			}
		}
	}
	a.Idle = since(n.meter.last.Load()) // read last: what came meanwhile is seen
	return a
}

// Touch counts as activity now, for a network whose guest just began to run.
func (n *Network) Touch() { n.meter.touch() }

// epoch is what instants are counted from, so that they are monotonic: a step
// of the host's clock makes nobody idle.
var epoch = time.Now()

// instant returns the time since epoch.
func instant() int64 { return int64(time.Since(epoch)) }

// since returns how long ago an instant was.
func since(at int64) time.Duration { return max(0, time.Since(epoch)-time.Duration(at)) }

// meter counts the payload of all flows.
type meter struct {
	bytes atomic.Int64
	last  atomic.Int64 // instant
}

func (m *meter) add(n int) {
	m.bytes.Add(int64(n))
	m.touch()
}

func (m *meter) touch() { m.last.Store(instant()) }

// What a peer sends within TLS that is no reply, in bytes: the session tickets
// and settings that follow its handshake, and later on the window updates,
// acknowledgements and pings of HTTP/2 and of WebSockets. Without this a
// request to a server that thinks for a minute would look answered at once.
const (
	tlsTickets = 1024
	tlsChatter = 96
)

// askPause ends a question: what the guest sends later than that behind its last
// payload, without a reply in between, is a repetition that prolongs nothing.
const askPause = 5 * time.Second

// usage is what the activity of one flow is judged by. A guest asks by sending
// payload, and is answered by any payload of the peer. Only within TLS more is
// needed, see tlsTickets. A guest that sends on and on is not waiting, but the
// bytes are activity by themselves.
type usage struct {
	mu      sync.Mutex
	last    int64 // instant of the last payload, either way; at first that of the flow's beginning
	asked   int64 // instant of the guest's question, if it is unanswered
	lastAsk int64 // instant of the guest's last payload
	asks    int   // questions so far
	open    bool  // the last question is unanswered
	tls     bool
	chatter int  // bytes of the peer since the question
	spoken  bool // the guest has sent payload
}

func (u *usage) begin() { u.last = instant() }

// pass notes payload of an inbound connection, either way.
func (u *usage) pass() {
	now := instant()
	u.mu.Lock()
	defer u.mu.Unlock()
	u.last = now
}

// fromGuest notes payload that the guest sent.
func (u *usage) fromGuest(p []byte) {
	now := instant()
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.spoken {
		// A TLS record of type handshake, version 3.x.
		u.spoken, u.tls = true, len(p) >= 2 && p[0] == 0x16 && p[1] == 0x03
	}
	switch {
	case !u.open:
		u.open, u.asked, u.chatter = true, now, 0
		u.asks++
	case time.Duration(now-u.lastAsk) < askPause:
		u.asked = now
	}
	u.lastAsk, u.last = now, now
}

// fromPeer notes n bytes of payload that the peer sent.
func (u *usage) fromPeer(n int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.last = instant()
	if !u.open {
		return
	}
	u.chatter += n
	// The first question of TLS is the ClientHello. The second is the end of the
	// handshake together with the first request.
	switch ignored := tlsChatter; {
	case !u.tls || u.asks == 1:
		u.open = false
	default:
		if u.asks == 2 {
			ignored = tlsTickets
		}
		u.open = u.chatter <= ignored
	}
}

// peerEnded notes that nothing more comes from the peer, and reports whether
// something was awaited.
func (u *usage) peerEnded() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	awaited := u.open
	u.open = false
	return awaited
}

// silence returns how long no payload passed.
func (u *usage) silence() time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	return since(u.last)
}

// awaits returns what is left of limit for a question that is unanswered, 0 or
// less if there is none or it is too old.
func (u *usage) awaits(limit time.Duration) time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.open {
		return 0
	}
	return limit - since(u.asked)
}

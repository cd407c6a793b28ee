package vnet

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

const (
	// maxSocketPath is what fits in a Unix socket's address on Linux, without
	// the closing zero.
	maxSocketPath = 107
	// maxFrame is the longest frame that QEMU passes on (its NET_BUFSIZE). A
	// guest can send frames beyond the MTU: they are skipped. A longer one is no
	// stream of QEMU's, and ends the link.
	maxFrame = 4096 + 65536
	// linkQueue is how many packets wait for the card before more are dropped,
	// as a card does, so that a guest that does not read stops nobody.
	linkQueue = 512
	// linkBatch is how many frames are written by one system call.
	linkBatch = 32
	// linkReadBuffer holds many small frames or the beginning of a large one.
	linkReadBuffer = 64 << 10

	lengthSize = 4
)

// link joins the stack to the guest's card. It is the stack's link endpoint,
// and reads and writes the frames of at most one stream at a time.
type link struct {
	log        *slog.Logger
	dispatcher stack.NetworkDispatcher // set before the first stream
	out        chan *stack.PacketBuffer
	muted      atomic.Bool // packets for the card are dropped

	mu     sync.Mutex
	conn   net.Conn      // of the current stream
	ended  chan struct{} // closed when that stream's goroutines are gone
	up     chan struct{} // closed when a stream comes
	closed bool
}

func newLink(log *slog.Logger) *link {
	return &link{log: log, out: make(chan *stack.PacketBuffer, linkQueue), up: make(chan struct{})}
}

// Listen accepts the stream of the guest's card at a Unix socket, which it
// makes, and returns when the socket is there. The socket is removed by Close.
// A new stream replaces the one before it. The path may have 107 bytes.
func (n *Network) Listen(socket string) error {
	if len(socket) > maxSocketPath {
		return fmt.Errorf("listen for the guest's card: socket path of %d bytes is too long, at most %d are possible: %s",
			len(socket), maxSocketPath, socket)
	}
	ln, err := net.Listen("unix", socket)
	if err != nil {
		return fmt.Errorf("listen for the guest's card: %w", err)
	}
	return n.Serve(ln)
}

// Serve accepts the stream of the guest's card from a listener, which it owns
// from now on, in the background until Close.
func (n *Network) Serve(ln net.Listener) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		ln.Close()
		return ErrClosed
	}
	n.listeners = append(n.listeners, ln)
	n.wg.Add(1)
	go func() {
		defer n.wg.Done()
		n.acceptLinks(ln)
	}()
	return nil
}

func (n *Network) acceptLinks(ln net.Listener) {
	for {
		conn, err := ln.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // out of descriptors, say
			n.log.Error("accept the guest's card", "error", err)
			time.Sleep(100 * time.Millisecond)
		default:
			n.link.replace(conn)
		}
	}
}

// replace ends the current stream, if there is one, and starts another.
func (l *link) replace(conn net.Conn) {
	l.drop()
	l.mu.Lock()
	for l.conn != nil { // another listener was faster
		l.mu.Unlock()
		l.drop()
		l.mu.Lock()
	}
	defer l.mu.Unlock()
	if l.closed {
		conn.Close()
		return
	}
	l.drain()
	l.conn, l.ended = conn, make(chan struct{})
	close(l.up)
	go l.run(conn, l.ended)
}

// drop ends the current stream and waits for its goroutines.
func (l *link) drop() {
	l.mu.Lock()
	conn, ended := l.conn, l.ended
	l.mu.Unlock()
	if conn != nil {
		conn.Close()
		<-ended
	}
}

func (l *link) close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.drop()
}

// waitUp waits for a stream and returns a channel that is closed when that
// stream has ended. The error is ctx's.
func (l *link) waitUp(ctx context.Context) (ended <-chan struct{}, err error) {
	for {
		l.mu.Lock()
		up, conn, ended := l.up, l.conn, l.ended
		l.mu.Unlock()
		if conn != nil {
			return ended, nil
		}
		select {
		case <-up:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// run serves one stream to its end.
func (l *link) run(conn net.Conn, ended chan struct{}) {
	l.log.Debug("the guest's card is joined")
	stop, written := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(written)
		l.writeFrames(conn, stop)
	}()
	err := l.readFrames(conn)
	conn.Close()
	close(stop)
	<-written

	l.mu.Lock()
	l.conn, l.up = nil, make(chan struct{})
	l.mu.Unlock()
	l.drain()
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed):
		l.log.Debug("the guest's card is gone")
	default:
		l.log.Warn("the guest's card was cut off", "error", err)
	}
	close(ended)
}

// readFrames hands the frames of a stream to the stack until the stream breaks.
func (l *link) readFrames(conn io.Reader) error {
	r := bufio.NewReaderSize(conn, linkReadBuffer)
	for {
		head, err := r.Peek(lengthSize)
		if err != nil {
			return err
		}
		size := int64(binary.BigEndian.Uint32(head))
		if size > maxFrame {
			return fmt.Errorf("frame of %d bytes, at most %d are possible", size, maxFrame)
		}
		r.Discard(lengthSize)
		if size < header.EthernetMinimumSize || size > header.EthernetMinimumSize+MTU {
			if _, err := r.Discard(int(size)); err != nil {
				return err
			}
			continue
		}
		if err := l.readFrame(r, int(size)); err != nil {
			return err
		}
	}
}

func (l *link) readFrame(r *bufio.Reader, size int) error {
	eth, err := r.Peek(header.EthernetMinimumSize)
	if err != nil {
		return err
	}
	protocol := etherType(eth)
	good := checkEthernet(eth)
	r.Discard(header.EthernetMinimumSize)
	size -= header.EthernetMinimumSize
	if !good {
		_, err := r.Discard(size)
		return err
	}
	view := buffer.NewViewSize(size)
	if _, err := io.ReadFull(r, view.AsSlice()); err != nil {
		view.Release()
		return err
	}
	if !checkPayload(protocol, view.AsSlice()) {
		view.Release()
		return nil
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithView(view)})
	l.dispatcher.DeliverNetworkPacket(protocol, pkt)
	pkt.DecRef()
	return nil
}

// writeFrames writes the packets of the queue until stop is closed or the
// stream breaks; then it closes the stream, so that its reader ends too.
func (l *link) writeFrames(conn net.Conn, stop <-chan struct{}) {
	w := frameWriter{conn: conn}
	for {
		select {
		case <-stop:
			return
		case pkt := <-l.out:
			w.add(pkt)
		}
		for more := true; more && len(w.packets) < linkBatch; {
			select {
			case pkt := <-l.out:
				w.add(pkt)
			default:
				more = false
			}
		}
		if err := w.flush(); err != nil {
			if !errors.Is(err, net.ErrClosed) && !errors.Is(err, os.ErrDeadlineExceeded) {
				l.log.Debug("write to the guest's card", "error", err)
			}
			conn.Close()
			return
		}
	}
}

// drain throws away what is queued for a card that is gone.
func (l *link) drain() {
	for {
		select {
		case pkt := <-l.out:
			pkt.DecRef()
		default:
			return
		}
	}
}

// frameWriter writes several packets, each as a frame, by one system call.
type frameWriter struct {
	conn    net.Conn
	packets []*stack.PacketBuffer
	heads   [linkBatch][lengthSize + header.EthernetMinimumSize]byte
	slices  net.Buffers
}

func (w *frameWriter) add(pkt *stack.PacketBuffer) {
	head := w.heads[len(w.packets)][:]
	binary.BigEndian.PutUint32(head, uint32(header.EthernetMinimumSize+pkt.Size()))
	header.Ethernet(head[lengthSize:]).Encode(&header.EthernetFields{
		SrcAddr: gatewayLinkAddress,
		DstAddr: guestLinkAddress, // there is nobody else
		Type:    pkt.NetworkProtocolNumber,
	})
	w.packets = append(w.packets, pkt)
	w.slices = append(append(w.slices, head), pkt.AsSlices()...)
}

func (w *frameWriter) flush() error {
	slices := w.slices
	_, err := slices.WriteTo(w.conn)
	for i, pkt := range w.packets {
		pkt.DecRef()
		w.packets[i] = nil
	}
	clear(w.slices)
	w.packets, w.slices = w.packets[:0], w.slices[:0]
	return err
}

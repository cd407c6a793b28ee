package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// maxMessage bounds one QMP message in bytes. The answers that the driver asks
// for are a few hundred bytes long.
const maxMessage = 1 << 20

// errDisconnected says that QEMU closed its monitor, which it does by ending.
var errDisconnected = errors.New("QEMU closed its monitor")

// qmpError is QEMU's refusal of a command.
type qmpError struct {
	Class string `json:"class"`
	Desc  string `json:"desc"`
}

func (e *qmpError) Error() string { return e.Desc + " (" + e.Class + ")" }

// qmpEvent is something that QEMU reports by itself.
type qmpEvent struct {
	Name string
	Data json.RawMessage
}

// qmpMessage is any message from QEMU: greeting, answer or event.
type qmpMessage struct {
	QMP    json.RawMessage `json:"QMP"`
	ID     uint64          `json:"id"`
	Return json.RawMessage `json:"return"`
	Error  *qmpError       `json:"error"`
	Event  string          `json:"event"`
	Data   json.RawMessage `json:"data"`
}

// monitor is a client of QEMU's machine protocol on one connection. Its
// commands may be executed at the same time.
type monitor struct {
	conn    *net.UnixConn
	greeted chan struct{} // closed when the greeting came
	done    chan struct{} // closed when the connection ended and every event was handed on

	sending sync.Mutex // keeps a command and the descriptor sent along together
	begun   *begun     // under sending: what QEMU has all but the last byte of

	mu      sync.Mutex
	lastID  uint64
	answers map[uint64]chan qmpMessage // nil once the connection ended
}

// begun is a command that was sent but for its last byte.
type begun struct {
	id    uint64
	order string // command and arguments
}

// endOfOrder is the last byte of each command.
const endOfOrder = "}"

// dropOrder makes QEMU forget the beginning of a command: it answers with an
// error that has no id, which nobody waits for.
const dropOrder = "\xff\n"

// newMonitor takes over conn and reads from it until its end. onEvent is called
// for each event, in order, on the reading goroutine: it must not execute commands.
func newMonitor(conn *net.UnixConn, onEvent func(qmpEvent)) *monitor {
	m := &monitor{
		conn:    conn,
		greeted: make(chan struct{}),
		done:    make(chan struct{}),
		answers: make(map[uint64]chan qmpMessage),
	}
	go m.read(onEvent)
	return m
}

func (m *monitor) read(onEvent func(qmpEvent)) {
	defer m.end()
	lines := bufio.NewScanner(m.conn)
	lines.Buffer(nil, maxMessage)
	greeted := false
	for lines.Scan() {
		var msg qmpMessage
		if json.Unmarshal(lines.Bytes(), &msg) != nil {
			return // not QMP: give up on this QEMU
		}
		switch {
		case msg.Event != "":
			onEvent(qmpEvent{Name: msg.Event, Data: msg.Data})
		case msg.QMP != nil && !greeted:
			greeted = true
			close(m.greeted)
		default:
			m.deliver(msg)
		}
	}
}

func (m *monitor) deliver(msg qmpMessage) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if ch, ok := m.answers[msg.ID]; ok {
		delete(m.answers, msg.ID)
		ch <- msg // has room for one
	}
}

func (m *monitor) end() {
	m.conn.Close()
	m.mu.Lock()
	for _, ch := range m.answers {
		close(ch)
	}
	m.answers = nil
	m.mu.Unlock()
	close(m.done)
}

// handshake waits for the greeting and leaves the negotiation mode.
func (m *monitor) handshake(ctx context.Context) error {
	select {
	case <-m.greeted:
		return m.execute(ctx, "qmp_capabilities", nil, nil)
	case <-m.done:
		return errDisconnected
	case <-ctx.Done():
		return ctx.Err()
	}
}

// execute runs a command with args (nil: none) and decodes what it returns into
// result (nil: ignored). Where ctx ends first the command may still take effect.
func (m *monitor) execute(ctx context.Context, command string, args, result any) error {
	return m.executeWithFile(ctx, command, args, result, nil)
}

// executeWithFile is execute with an open file sent along, for getfd.
func (m *monitor) executeWithFile(ctx context.Context, command string, args, result any, file *os.File) error {
	order, err := encodeOrder(command, args)
	if err != nil {
		return fmt.Errorf("QMP %s: %w", command, err)
	}
	id, answer, err := m.send(order, file)
	if err != nil {
		return fmt.Errorf("QMP %s: %w", command, err)
	}
	defer m.forget(id)
	select {
	case msg, ok := <-answer:
		switch {
		case !ok:
			return fmt.Errorf("QMP %s: %w", command, errDisconnected)
		case msg.Error != nil:
			return fmt.Errorf("QMP %s: %w", command, msg.Error)
		case result == nil:
			return nil
		}
		if err := json.Unmarshal(msg.Return, result); err != nil {
			return fmt.Errorf("QMP %s: decode the answer: %w", command, err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("QMP %s: %w", command, ctx.Err())
	}
}

// begin sends a command but for its last byte, so that it takes QEMU hardly any
// time to be told the rest: it reads its monitor one byte at a time, with eight
// system calls for each. A later execute of the same completes it; one of another
// command takes it back before.
func (m *monitor) begin(command string, args any) error {
	order, err := encodeOrder(command, args)
	if err != nil {
		return fmt.Errorf("QMP %s: %w", command, err)
	}
	m.sending.Lock()
	defer m.sending.Unlock()
	b := &begun{id: m.newID(), order: order}
	line := m.takeBack() + strings.TrimSuffix(order+withID(b.id), endOfOrder)
	if err := m.write(line, nil); err != nil {
		return fmt.Errorf("QMP %s: %w", command, err)
	}
	m.begun = b
	return nil
}

// takeBack returns what makes QEMU forget the command that was begun, if one
// was. m.sending is held.
func (m *monitor) takeBack() string {
	if m.begun == nil {
		return ""
	}
	m.begun = nil
	return dropOrder
}

// encodeOrder returns a command without its end, which withID is.
func encodeOrder(command string, args any) (string, error) {
	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
	}{command, args})
	return strings.TrimSuffix(string(line), endOfOrder), err
}

func withID(id uint64) string {
	return `,"id":` + strconv.FormatUint(id, 10) + endOfOrder
}

func (m *monitor) newID() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lastID++
	return m.lastID
}

// await returns the channel that takes the answer with that id.
func (m *monitor) await(id uint64) (chan qmpMessage, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.answers == nil {
		return nil, errDisconnected
	}
	ch := make(chan qmpMessage, 1)
	m.answers[id] = ch
	return ch, nil
}

func (m *monitor) forget(id uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.answers, id)
}

// send sends an order, or what is left of it, and returns its id, to be
// forgotten, and the channel that takes its answer.
func (m *monitor) send(order string, file *os.File) (id uint64, answer chan qmpMessage, err error) {
	m.sending.Lock()
	defer m.sending.Unlock()
	line := endOfOrder
	if m.begun != nil && m.begun.order == order && file == nil {
		id, m.begun = m.begun.id, nil
	} else {
		id = m.newID()
		line = m.takeBack() + order + withID(id)
	}
	if answer, err = m.await(id); err != nil {
		return 0, nil, err
	}
	if err := m.write(line, file); err != nil {
		m.forget(id)
		return 0, nil, err
	}
	return id, answer, nil
}

func (m *monitor) write(line string, file *os.File) error {
	var rights []byte
	if file != nil {
		rights = unix.UnixRights(int(file.Fd()))
	}
	n, _, err := m.conn.WriteMsgUnix([]byte(line), rights, nil)
	if err == nil && n < len(line) {
		err = io.ErrShortWrite
	}
	if errors.Is(err, net.ErrClosed) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return errDisconnected
	}
	return err
}

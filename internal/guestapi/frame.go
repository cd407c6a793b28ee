package guestapi

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"strings"
	"time"
)

// CallPort is a TCP port of the agent for the calls that a hibernation and a
// resume wait for. A guest that has just woken finds all its code cold, so they
// go without HTTP: one frame each way, see docs/formats/agent.md. Agents of
// before refuse the connection and take the same calls on Port.
const CallPort = 49982

// MaxCall bounds a call's frame in bytes.
const MaxCall = 1 << 20

// Operation is the first byte of a call's frame. One that changes its layout
// gets a new number.
type Operation byte

// The calls that there are as frames.
const (
	OpInit   Operation = 1
	OpFreeze Operation = 2

	// With hooks, and their results in the answer. Agents of before do not know them.
	OpInitHooks   Operation = 3
	OpFreezeHooks Operation = 4
)

// ErrNoHooks means that the agent is one of before hooks: InitOver and FreezeOver
// did nothing, and must be replaced by InitWithoutHooks and FreezeWithoutHooks,
// each over a new connection.
var ErrNoHooks = errors.New("the agent knows no hooks")

// unknownOperation is how an agent's answer to an operation begins that it does
// not know.
const unknownOperation = "unknown operation"

// Status is the first byte of an answer's frame.
type Status byte

// What an answer says. All but StatusOK are followed by a text.
const (
	StatusOK           Status = 0
	StatusUnauthorized Status = 1 // wrong token
	StatusRefused      Status = 2 // the attempt was thawed
	StatusInvalid      Status = 3 // the call makes no sense
	StatusFailed       Status = 4
)

// InitOver is Client.Init over a connection to CallPort, which it leaves open.
func InitOver(ctx context.Context, conn net.Conn, token string, req InitRequest) (InitResponse, error) {
	return initOver(ctx, conn, OpInitHooks, token, req)
}

// InitWithoutHooks is InitOver for agents that know no hooks.
func InitWithoutHooks(ctx context.Context, conn net.Conn, token string, req InitRequest) (InitResponse, error) {
	return initOver(ctx, conn, OpInit, token, req)
}

func initOver(ctx context.Context, conn net.Conn, op Operation, token string, req InitRequest) (InitResponse, error) {
	var resp InitResponse
	err := callOver(ctx, conn, EncodeInit(op, token, req), func(d *decoder) {
		resp.AgentVersion, resp.SocketsDestroyed = printable(d.text()), int(d.uint32())
		resp.Steps, resp.Warnings = d.outcome()
		if op == OpInitHooks {
			resp.Hooks = BoundHookResults(decodeList[HookResult](d))
		}
	})
	if err != nil {
		return InitResponse{}, fmt.Errorf("agent call init: %w", err)
	}
	return resp, nil
}

// closeWait is how long FreezeOver waits for the end of the connection.
const closeWait = 200 * time.Millisecond

// FreezeOver is Client.Freeze over a connection to CallPort. It returns when the
// agent has closed the connection, or does not within 0.2 s: a guest that is
// paused earlier would begin its next life with that.
func FreezeOver(ctx context.Context, conn net.Conn, token string, req FreezeRequest) (FreezeResponse, error) {
	return freezeOver(ctx, conn, OpFreezeHooks, token, req)
}

// FreezeWithoutHooks is FreezeOver for agents that know no hooks.
func FreezeWithoutHooks(ctx context.Context, conn net.Conn, token string, req FreezeRequest) (FreezeResponse, error) {
	return freezeOver(ctx, conn, OpFreeze, token, req)
}

func freezeOver(ctx context.Context, conn net.Conn, op Operation, token string, req FreezeRequest) (FreezeResponse, error) {
	var resp FreezeResponse
	err := callOver(ctx, conn, EncodeFreeze(op, token, req), func(d *decoder) {
		resp.Steps, resp.Warnings = d.outcome()
		if op == OpFreezeHooks {
			resp.Hooks = BoundHookResults(decodeList[HookResult](d))
		}
	})
	if err != nil {
		return FreezeResponse{}, fmt.Errorf("agent call freeze: %w", err)
	}
	if conn.SetReadDeadline(time.Now().Add(closeWait)) == nil {
		_, _ = conn.Read(make([]byte, 1)) // its end
	}
	return resp, nil
}

// callOver sends a call and reads its answer, until ctx ends.
func callOver(ctx context.Context, conn net.Conn, call []byte, read func(*decoder)) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	answer, err := exchange(conn, call)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	return readStatus(answer, read)
}

func exchange(conn net.Conn, call []byte) ([]byte, error) {
	if _, err := conn.Write(call); err != nil {
		return nil, err
	}
	return ReadFrame(conn, maxAnswer)
}

// readStatus decodes an answer.
func readStatus(answer []byte, read func(*decoder)) error {
	d := &decoder{rest: answer}
	switch status := Status(d.byte()); status {
	case StatusOK:
		read(d)
		return d.end()
	case StatusUnauthorized:
		return ErrUnauthorized
	case StatusRefused:
		return ErrRefused
	default:
		text := d.text()
		if status == StatusInvalid && strings.HasPrefix(text, unknownOperation) {
			return ErrNoHooks
		}
		return fmt.Errorf("the agent answered %d: %s", status, printable(text))
	}
}

// ReadFrame reads a frame of at most limit bytes and returns what is in it.
func ReadFrame(r io.Reader, limit int) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(size[:])
	if int64(n) > int64(limit) {
		return nil, fmt.Errorf("a frame of %d bytes is longer than %d", n, limit)
	}
	b := make([]byte, n)
	_, err := io.ReadFull(r, b)
	return b, err
}

// EncodeInit returns the frame of an init: op is OpInit, which leaves hooks out,
// or OpInitHooks.
func EncodeInit(op Operation, token string, req InitRequest) []byte {
	e := newFrame(byte(op))
	e.text(token)
	e.text(req.Reason)
	e.uint64(uint64(req.UnixNano))
	e.text(string(req.Entropy))
	e.uint64(req.Generation)
	e.text(req.Snapshot)
	e.uint64(math.Float64bits(req.SleptSeconds))
	e.identity(req.Identity)
	if op == OpInitHooks {
		e.text(encodeList(req.Hooks))
	}
	return e.frame()
}

func (e *encoder) identity(id *Identity) {
	if id == nil {
		e.b = append(e.b, 0)
		return
	}
	e.b = append(e.b, 1)
	for _, s := range []string{id.ID, id.Hostname, id.MachineID, id.ControlToken, id.AccessToken} {
		e.text(s)
	}
	e.uint32(uint32(len(id.Env)))
	for name, value := range id.Env {
		e.text(name)
		e.text(value)
	}
}

// EncodeFreeze returns the frame of a freeze: op is OpFreeze, which leaves hooks
// out, or OpFreezeHooks.
func EncodeFreeze(op Operation, token string, req FreezeRequest) []byte {
	e := newFrame(byte(op))
	e.text(token)
	e.uint64(req.Attempt)
	e.uint64(uint64(req.Deadline))
	if op == OpFreezeHooks {
		e.text(req.Reason)
		e.text(req.Snapshot)
		e.uint64(req.Generation)
		e.text(encodeList(req.Hooks))
	}
	return e.frame()
}

// Call is what a call's frame holds: the request that its operation has.
type Call struct {
	Operation Operation
	Token     string
	Init      InitRequest
	Freeze    FreezeRequest
}

// DecodeCall reads what ReadFrame returned.
func DecodeCall(b []byte) (Call, error) {
	d := &decoder{rest: b}
	c := Call{Operation: Operation(d.byte())}
	switch c.Operation {
	case OpInit, OpInitHooks:
		c.Token = d.text()
		c.Init = d.init()
		if c.Operation == OpInitHooks {
			c.Init.Hooks = decodeList[Hook](d)
		}
	case OpFreeze, OpFreezeHooks:
		c.Token = d.text()
		c.Freeze = FreezeRequest{Attempt: d.uint64(), Deadline: time.Duration(d.uint64())}
		if c.Operation == OpFreezeHooks {
			c.Freeze.Reason, c.Freeze.Snapshot, c.Freeze.Generation = d.text(), d.text(), d.uint64()
			c.Freeze.Hooks = decodeList[Hook](d)
		}
	default:
		return Call{}, fmt.Errorf(unknownOperation+" %d", c.Operation)
	}
	return c, d.end()
}

func (d *decoder) init() InitRequest {
	req := InitRequest{Reason: d.text(), UnixNano: int64(d.uint64()), Entropy: []byte(d.text()), Generation: d.uint64(), Snapshot: d.text()}
	req.SleptSeconds = math.Float64frombits(d.uint64())
	if d.byte() == 0 {
		return req
	}
	req.Identity = &Identity{ID: d.text(), Hostname: d.text(), MachineID: d.text(), ControlToken: d.text(), AccessToken: d.text()}
	if n := d.uint32(); n > 0 {
		req.Identity.Env = map[string]string{}
		for ; n > 0 && d.err == nil; n-- {
			name := d.text()
			req.Identity.Env[name] = d.text()
		}
	}
	return req
}

// EncodeInitAnswer returns the frame that answers an init that came as op.
func EncodeInitAnswer(op Operation, resp InitResponse) []byte {
	e := newFrame(byte(StatusOK))
	e.text(resp.AgentVersion)
	e.uint32(uint32(resp.SocketsDestroyed))
	e.outcome(resp.Steps, resp.Warnings)
	if op == OpInitHooks {
		e.text(encodeList(resp.Hooks))
	}
	return e.frame()
}

// EncodeFreezeAnswer returns the frame that answers a freeze that came as op.
func EncodeFreezeAnswer(op Operation, resp FreezeResponse) []byte {
	e := newFrame(byte(StatusOK))
	e.outcome(resp.Steps, resp.Warnings)
	if op == OpFreezeHooks {
		e.text(encodeList(resp.Hooks))
	}
	return e.frame()
}

// EncodeError returns the frame of an answer that is no success.
func EncodeError(status Status, message string) []byte {
	e := newFrame(byte(status))
	e.text(message)
	return e.frame()
}

// encoder writes a frame: its length, then its fields.
type encoder struct{ b []byte }

func newFrame(kind byte) *encoder {
	return &encoder{b: append(make([]byte, 4, 512), kind)}
}

func (e *encoder) frame() []byte {
	binary.LittleEndian.PutUint32(e.b, uint32(len(e.b)-4))
	return e.b
}

func (e *encoder) uint32(v uint32) { e.b = binary.LittleEndian.AppendUint32(e.b, v) }
func (e *encoder) uint64(v uint64) { e.b = binary.LittleEndian.AppendUint64(e.b, v) }

func (e *encoder) text(s string) {
	e.uint32(uint32(len(s)))
	e.b = append(e.b, s...)
}

func (e *encoder) outcome(steps map[string]float64, warnings []string) {
	e.uint32(uint32(len(steps)))
	for name, ms := range steps {
		e.text(name)
		e.uint64(math.Float64bits(ms))
	}
	e.uint32(uint32(len(warnings)))
	for _, w := range warnings {
		e.text(w)
	}
}

var errCut = errors.New("the frame ends too soon")

// decoder reads fields. After an error they are all zero.
type decoder struct {
	rest []byte
	err  error
}

func (d *decoder) take(n int) []byte {
	if d.err != nil || n > len(d.rest) {
		d.err, d.rest = errCut, nil
		return nil
	}
	b := d.rest[:n]
	d.rest = d.rest[n:]
	return b
}

func (d *decoder) byte() byte {
	if b := d.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (d *decoder) uint32() uint32 {
	if b := d.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (d *decoder) uint64() uint64 {
	if b := d.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

func (d *decoder) text() string { return string(d.take(int(d.uint32()))) }

// outcome reads what a guest says of its steps, bounded as all that it says.
func (d *decoder) outcome() (map[string]float64, []string) {
	steps, warnings := map[string]float64{}, []string(nil)
	for n := d.uint32(); n > 0 && d.err == nil; n-- {
		name := d.text()
		if ms := math.Float64frombits(d.uint64()); d.err == nil && ms >= 0 && ms < math.Inf(1) {
			steps[name] = ms
		}
	}
	for n := d.uint32(); n > 0 && d.err == nil; n-- {
		warnings = append(warnings, d.text())
	}
	return boundSteps(steps), boundWarnings(warnings)
}

func (d *decoder) end() error {
	if d.err == nil && len(d.rest) > 0 {
		d.err = fmt.Errorf("%d bytes too many in the frame", len(d.rest))
	}
	return d.err
}

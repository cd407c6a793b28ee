package guestapi_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math"
	"net"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/hibernacle/hibernacle/internal/guestapi"
)

// answering is a connection whose other end answers any call with b.
func answering(t *testing.T, b []byte) net.Conn {
	t.Helper()
	ours, theirs := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer theirs.Close()
		if _, err := guestapi.ReadFrame(theirs, guestapi.MaxCall); err == nil {
			_, _ = theirs.Write(b)
		}
	}()
	t.Cleanup(func() { ours.Close(); <-done })
	return ours
}

func initCall() guestapi.InitRequest {
	return guestapi.InitRequest{
		Reason: guestapi.ReasonFork, UnixNano: 1, Entropy: []byte{2, 3}, Generation: 4, Snapshot: "s", SleptSeconds: 0.5,
		Identity: &guestapi.Identity{ID: "i", Hostname: "h", MachineID: "m", ControlToken: "c", AccessToken: "a", Env: map[string]string{"K": "V"}},
	}
}

func someHooks() []guestapi.Hook {
	return []guestapi.Hook{
		{Name: "a", Event: guestapi.EventPreHibernate, Command: []string{"/bin/true"}, Timeout: time.Second},
		{Name: "b", Event: guestapi.EventPostResume, Command: []string{"echo", "b"}, User: "user", Env: map[string]string{"K": "V"}, Background: true},
	}
}

// TestFrames pins the layout that agents and hosts of different releases share.
func TestFrames(t *testing.T) {
	for name, tt := range map[string]struct {
		got  []byte
		want string
	}{
		"init": {guestapi.EncodeInit(guestapi.OpInit, "t", initCall()),
			"59000000" + "01" + "0100000074" + "04000000666f726b" + "0100000000000000" + "020000000203" + "0400000000000000" +
				"0100000073" + "000000000000e03f" + "01" + "0100000069" + "0100000068" + "010000006d" + "0100000063" + "0100000061" +
				"01000000" + "010000004b" + "0100000056"},
		"freeze": {guestapi.EncodeFreeze(guestapi.OpFreeze, "t", guestapi.FreezeRequest{Attempt: 2, Deadline: 3}), "16000000" + "02" + "0100000074" + "0200000000000000" + "0300000000000000"},
		"freeze with hooks": {guestapi.EncodeFreeze(guestapi.OpFreezeHooks, "t", guestapi.FreezeRequest{Attempt: 2, Deadline: 3, Reason: "r", Snapshot: "s", Generation: 4}),
			"2c000000" + "04" + "0100000074" + "0200000000000000" + "0300000000000000" + "0100000072" + "0100000073" + "0400000000000000" + "00000000"},
		"init's answer": {guestapi.EncodeInitAnswer(guestapi.OpInit, guestapi.InitResponse{AgentVersion: "v", SocketsDestroyed: 2, Steps: map[string]float64{"s": 0.5}, Warnings: []string{"w"}}),
			"24000000" + "00" + "0100000076" + "02000000" + "01000000" + "0100000073" + "000000000000e03f" + "01000000" + "0100000077"},
		"freeze's answer": {guestapi.EncodeFreezeAnswer(guestapi.OpFreeze, guestapi.FreezeResponse{}), "09000000" + "00" + "00000000" + "00000000"},
		"an error":        {guestapi.EncodeError(guestapi.StatusRefused, "no"), "07000000" + "02" + "020000006e6f"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := hex.EncodeToString(tt.got); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

func TestCallsAreDecoded(t *testing.T) {
	small := guestapi.InitRequest{Reason: guestapi.ReasonResume, Entropy: []byte{1}}
	for _, want := range []guestapi.Call{
		{Operation: guestapi.OpInit, Token: "t", Init: initCall()},
		{Operation: guestapi.OpInit, Init: small},
		{Operation: guestapi.OpFreeze, Token: "t", Freeze: guestapi.FreezeRequest{Attempt: math.MaxUint64, Deadline: time.Hour}},
		{Operation: guestapi.OpInitHooks, Init: small},
		{Operation: guestapi.OpInitHooks, Init: guestapi.InitRequest{Reason: guestapi.ReasonResume, Entropy: []byte{1}, Hooks: someHooks()}},
		{Operation: guestapi.OpFreezeHooks, Token: "t", Freeze: guestapi.FreezeRequest{Attempt: 1, Deadline: 2, Reason: "r", Snapshot: "s", Generation: 9, Hooks: someHooks()}},
	} {
		b := guestapi.EncodeInit(want.Operation, want.Token, want.Init)
		if want.Operation == guestapi.OpFreeze || want.Operation == guestapi.OpFreezeHooks {
			b = guestapi.EncodeFreeze(want.Operation, want.Token, want.Freeze)
		}
		got, err := guestapi.DecodeCall(b[4:])
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, %v, want %+v", got, err, want)
		}
		for cut := range len(b) - 4 {
			if _, err := guestapi.DecodeCall(b[4 : 4+cut]); err == nil {
				t.Errorf("a frame cut at %d was taken", cut)
			}
		}
		if _, err := guestapi.DecodeCall(append(bytes.Clone(b[4:]), 0)); err == nil {
			t.Error("a frame with a byte too many was taken")
		}
	}
	if _, err := guestapi.DecodeCall([]byte{9}); err == nil || !strings.Contains(err.Error(), "operation 9") {
		t.Errorf("an unknown operation: %v", err)
	}
}

func TestAnswersOverFrames(t *testing.T) {
	want := guestapi.InitResponse{AgentVersion: "1", SocketsDestroyed: 2, Steps: map[string]float64{"clock": 0.5}, Warnings: []string{"w"}}
	got, err := guestapi.InitOver(t.Context(), answering(t, guestapi.EncodeInitAnswer(guestapi.OpInitHooks, want)), "t", guestapi.InitRequest{})
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	frozen, err := guestapi.FreezeOver(t.Context(), answering(t, guestapi.EncodeFreezeAnswer(guestapi.OpFreezeHooks, guestapi.FreezeResponse{Warnings: []string{"w"}})), "t", guestapi.FreezeRequest{})
	if err != nil || len(frozen.Warnings) != 1 {
		t.Errorf("%+v, %v", frozen, err)
	}
	for status, want := range map[guestapi.Status]error{guestapi.StatusUnauthorized: guestapi.ErrUnauthorized, guestapi.StatusRefused: guestapi.ErrRefused} {
		_, err := guestapi.FreezeOver(t.Context(), answering(t, guestapi.EncodeError(status, "x")), "t", guestapi.FreezeRequest{})
		if !errors.Is(err, want) {
			t.Errorf("%d: %v", status, err)
		}
	}
}

func TestAnAgentOfBeforeIsTold(t *testing.T) {
	_, err := guestapi.InitOver(t.Context(), answering(t, guestapi.EncodeError(guestapi.StatusInvalid, "unknown operation 3")), "t", guestapi.InitRequest{})
	if !errors.Is(err, guestapi.ErrNoHooks) {
		t.Errorf("got %v", err)
	}
	plain := guestapi.EncodeFreezeAnswer(guestapi.OpFreeze, guestapi.FreezeResponse{Warnings: []string{"w"}})
	resp, err := guestapi.FreezeWithoutHooks(t.Context(), answering(t, plain), "t", guestapi.FreezeRequest{})
	if err != nil || len(resp.Warnings) != 1 {
		t.Errorf("%+v, %v", resp, err)
	}
}

func TestHookResultsAreBounded(t *testing.T) {
	hostile := guestapi.HookResult{Name: strings.Repeat("n", 1<<10), Reason: "\x1b[2J", DurationMS: math.Inf(1), DroppedBytes: -1,
		Output: strings.Repeat("\x1b]0;\a\xff", 64<<10)}
	out := guestapi.BoundHookResults(slices.Repeat([]guestapi.HookResult{hostile}, 1000))
	size := 0
	for _, r := range out {
		size += len(r.Output)
		if len(r.Name) > 600 || strings.Contains(r.Reason+r.Output, "\x1b") || r.DurationMS != 0 || r.DroppedBytes < 0 || !utf8.ValidString(r.Output) {
			t.Fatalf("%+v", r)
		}
	}
	if len(out) > 2*guestapi.MaxHooks || size > 256<<10 {
		t.Errorf("%d results with %d bytes", len(out), size)
	}
}

func TestHooksAreChecked(t *testing.T) {
	for name, spoil := range map[string]func(*guestapi.Hook){
		"no name":     func(h *guestapi.Hook) { h.Name = "" },
		"slash":       func(h *guestapi.Hook) { h.Name = "a/b" },
		"escape":      func(h *guestapi.Hook) { h.Name = "a\x1b" },
		"event":       func(h *guestapi.Hook) { h.Event = "never" },
		"nothing":     func(h *guestapi.Hook) { h.Command = nil },
		"background":  func(h *guestapi.Hook) { h.Event, h.Background = guestapi.EventPreHibernate, true },
		"time-out":    func(h *guestapi.Hook) { h.Timeout = time.Hour },
		"negative":    func(h *guestapi.Hook) { h.Timeout = -1 },
		"NUL":         func(h *guestapi.Hook) { h.Command = []string{"a\x00"} },
		"environment": func(h *guestapi.Hook) { h.Env = map[string]string{"A=B": ""} },
	} {
		h := guestapi.Hook{Name: "n", Event: guestapi.EventPostResume, Command: []string{"true"}}
		if err := guestapi.CheckHook(h); err != nil {
			t.Fatal(err)
		}
		if spoil(&h); guestapi.CheckHook(h) == nil {
			t.Errorf("%s was taken", name)
		}
	}
}

// TestHostileFrames: nothing that a guest answers is taken beyond its bounds.
func TestHostileFrames(t *testing.T) {
	many := guestapi.InitResponse{Steps: map[string]float64{"not a number": math.NaN(), "for ever": math.Inf(1), "before": -1}}
	for i := range 100 {
		many.Steps[strings.Repeat("s", i)] = 1
		many.Warnings = append(many.Warnings, "a\n")
	}
	resp, err := guestapi.InitOver(t.Context(), answering(t, guestapi.EncodeInitAnswer(guestapi.OpInitHooks, many)), "t", guestapi.InitRequest{})
	if err != nil || len(resp.Warnings) > 32 || len(resp.Steps) > 64 || resp.Warnings[0] != `"a\n"` {
		t.Errorf("%+v, %v", resp, err)
	}
	for name := range many.Steps {
		if _, ok := resp.Steps[name]; ok && many.Steps[name] != 1 {
			t.Errorf("step %q took %v", name, many.Steps[name])
		}
	}
	for name, b := range map[string][]byte{
		"nothing":   nil,
		"too long":  {0xff, 0xff, 0xff, 0xff, 0},
		"empty":     {0, 0, 0, 0},
		"cut":       {9, 0, 0, 0, 0, 1},
		"no fields": {1, 0, 0, 0, 0},
		"count":     {9, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f, 0, 0, 0, 0},
		"text":      append([]byte{7, 0, 0, 0, 4, 2, 0, 0, 0}, "\x1b["...),
	} {
		_, err := guestapi.FreezeOver(t.Context(), answering(t, b), "t", guestapi.FreezeRequest{})
		if err == nil || strings.Contains(err.Error(), "\x1b") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFrameCallsEndWithTheirContext(t *testing.T) {
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, _ = guestapi.ReadFrame(theirs, guestapi.MaxCall)
		cancel()
	}()
	if _, err := guestapi.InitOver(ctx, ours, "t", guestapi.InitRequest{}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func FuzzDecodeCall(f *testing.F) {
	f.Add(guestapi.EncodeInit(guestapi.OpInit, "t", initCall())[4:])
	f.Add(guestapi.EncodeFreeze(guestapi.OpFreeze, "t", guestapi.FreezeRequest{Attempt: 1})[4:])
	f.Add(guestapi.EncodeInit(guestapi.OpInitHooks, "t", guestapi.InitRequest{Hooks: someHooks()})[4:])
	f.Add(guestapi.EncodeFreeze(guestapi.OpFreezeHooks, "t", guestapi.FreezeRequest{Attempt: 1, Hooks: someHooks()})[4:])
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := guestapi.DecodeCall(b)
		if err != nil {
			return
		}
		again := guestapi.EncodeInit(c.Operation, c.Token, c.Init)
		if c.Operation == guestapi.OpFreeze || c.Operation == guestapi.OpFreezeHooks {
			again = guestapi.EncodeFreeze(c.Operation, c.Token, c.Freeze)
		}
		// A variable that comes twice, and any number but 0 for "there is an
		// identity", are written otherwise.
		if d, err := guestapi.DecodeCall(again[4:]); err != nil || !sameCall(c, d) {
			t.Errorf("%+v was written and read as %+v, %v", c, d, err)
		}
	})
}

func sameCall(a, b guestapi.Call) bool {
	if math.Float64bits(a.Init.SleptSeconds) == math.Float64bits(b.Init.SleptSeconds) {
		a.Init.SleptSeconds, b.Init.SleptSeconds = 0, 0 // which may be no number
	}
	for _, lists := range [][2]*[]guestapi.Hook{{&a.Init.Hooks, &b.Init.Hooks}, {&a.Freeze.Hooks, &b.Freeze.Hooks}} {
		one, _ := json.Marshal(append([]guestapi.Hook{}, *lists[0]...))
		other, _ := json.Marshal(append([]guestapi.Hook{}, *lists[1]...))
		if !bytes.Equal(one, other) { // an empty environment is left out
			return false
		}
		*lists[0], *lists[1] = nil, nil
	}
	return reflect.DeepEqual(a, b)
}

func FuzzAnswer(f *testing.F) {
	f.Add(guestapi.EncodeInitAnswer(guestapi.OpInitHooks, guestapi.InitResponse{AgentVersion: "v", Steps: map[string]float64{"a": 1}, Warnings: []string{"w"}}))
	f.Add(guestapi.EncodeError(guestapi.StatusFailed, "x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		resp, err := guestapi.InitOver(t.Context(), answering(t, b), "t", guestapi.InitRequest{})
		if err == nil && (len(resp.Steps) > 64 || len(resp.Warnings) > 32 || resp.SocketsDestroyed < 0) {
			t.Errorf("%+v", resp)
		}
	})
}

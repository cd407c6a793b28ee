package guestapi_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"math"
	"net"
	"reflect"
	"strings"
	"testing"
	"time"

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

// TestFrames pins the layout that agents and hosts of different releases share.
func TestFrames(t *testing.T) {
	for name, tt := range map[string]struct {
		got  []byte
		want string
	}{
		"init": {guestapi.EncodeInit("t", initCall()),
			"59000000" + "01" + "0100000074" + "04000000666f726b" + "0100000000000000" + "020000000203" + "0400000000000000" +
				"0100000073" + "000000000000e03f" + "01" + "0100000069" + "0100000068" + "010000006d" + "0100000063" + "0100000061" +
				"01000000" + "010000004b" + "0100000056"},
		"freeze": {guestapi.EncodeFreeze("t", guestapi.FreezeRequest{Attempt: 2, Deadline: 3}), "16000000" + "02" + "0100000074" + "0200000000000000" + "0300000000000000"},
		"init's answer": {guestapi.EncodeInitAnswer(guestapi.InitResponse{AgentVersion: "v", SocketsDestroyed: 2, Steps: map[string]float64{"s": 0.5}, Warnings: []string{"w"}}),
			"24000000" + "00" + "0100000076" + "02000000" + "01000000" + "0100000073" + "000000000000e03f" + "01000000" + "0100000077"},
		"freeze's answer": {guestapi.EncodeFreezeAnswer(guestapi.FreezeResponse{}), "09000000" + "00" + "00000000" + "00000000"},
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
	} {
		b := guestapi.EncodeInit(want.Token, want.Init)
		if want.Operation == guestapi.OpFreeze {
			b = guestapi.EncodeFreeze(want.Token, want.Freeze)
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
	got, err := guestapi.InitOver(t.Context(), answering(t, guestapi.EncodeInitAnswer(want)), "t", guestapi.InitRequest{})
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	frozen, err := guestapi.FreezeOver(t.Context(), answering(t, guestapi.EncodeFreezeAnswer(guestapi.FreezeResponse{Warnings: []string{"w"}})), "t", guestapi.FreezeRequest{})
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

// TestHostileFrames: nothing that a guest answers is taken beyond its bounds.
func TestHostileFrames(t *testing.T) {
	many := guestapi.InitResponse{Steps: map[string]float64{"not a number": math.NaN(), "for ever": math.Inf(1), "before": -1}}
	for i := range 100 {
		many.Steps[strings.Repeat("s", i)] = 1
		many.Warnings = append(many.Warnings, "a\n")
	}
	resp, err := guestapi.InitOver(t.Context(), answering(t, guestapi.EncodeInitAnswer(many)), "t", guestapi.InitRequest{})
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
	f.Add(guestapi.EncodeInit("t", initCall())[4:])
	f.Add(guestapi.EncodeFreeze("t", guestapi.FreezeRequest{Attempt: 1})[4:])
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := guestapi.DecodeCall(b)
		if err != nil {
			return
		}
		again := guestapi.EncodeInit(c.Token, c.Init)
		if c.Operation == guestapi.OpFreeze {
			again = guestapi.EncodeFreeze(c.Token, c.Freeze)
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
	return reflect.DeepEqual(a, b)
}

func FuzzAnswer(f *testing.F) {
	f.Add(guestapi.EncodeInitAnswer(guestapi.InitResponse{AgentVersion: "v", Steps: map[string]float64{"a": 1}, Warnings: []string{"w"}}))
	f.Add(guestapi.EncodeError(guestapi.StatusFailed, "x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		resp, err := guestapi.InitOver(t.Context(), answering(t, b), "t", guestapi.InitRequest{})
		if err == nil && (len(resp.Steps) > 64 || len(resp.Warnings) > 32 || resp.SocketsDestroyed < 0) {
			t.Errorf("%+v", resp)
		}
	})
}

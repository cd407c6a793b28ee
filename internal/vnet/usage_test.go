package vnet

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A flow awaits a reply as its story tells: "g10" is 10 bytes of the guest,
// "p10" of the peer, "w7" a wait of 7 seconds, "end" the peer's end.
func TestUsageAwaits(t *testing.T) {
	const limit = 5 * time.Minute
	for _, tc := range []struct {
		name  string
		tls   bool
		story string
		want  bool
	}{
		{"silent", false, "w1", false},
		{"the peer speaks first", false, "p100", false},
		{"asked", false, "g1", true},
		{"answered", false, "g100 p1", false},
		{"asked again", false, "g100 p1 w60 g5", true},
		{"almost too long", false, "g100 w299", true},
		{"too long", false, "g100 w300", false},
		{"answered late, asked again", false, "g100 w400 p1 g1 w10", true},
		{"the question takes long to send", false, strings.Repeat("g9 w4 ", 100) + "w290", true},
		{"repeated, which prolongs nothing", false, strings.Repeat("g9 w30 ", 10), false},
		{"the peer has ended", false, "g10 end", false},

		{"tls: the hello is answered", true, "g500 p1", false},
		{"tls: tickets are no reply", true, "g500 p3000 g300 p255 p255 w120", true},
		{"tls: settings and an update are no reply", true, "g500 p3000 g300 p50 p40 w120", true},
		{"tls: more is a reply", true, "g500 p3000 g300 p255 p255 p600", false},
		{"tls: a later update is no reply", true, "g500 p3000 g300 p3000 g90000 p35 w120", true},
		{"tls: a later reply", true, "g500 p3000 g300 p3000 g90000 p35 p150", false},
		{"tls: pings and pongs", true, "g500 p3000 g300 p3000 " + strings.Repeat("g30 p30 w20 ", 16), false},
		{"tls: too long", true, "g500 p3000 g300 p500 w300", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var u usage
				u.begin()
				for _, step := range strings.Fields(tc.story) {
					n := 0
					fmt.Sscanf(step[1:], "%d", &n)
					switch step[0] {
					case 'g':
						p := make([]byte, n)
						if tc.tls {
							copy(p, "\x16\x03\x01")
						}
						u.fromGuest(p)
					case 'p':
						u.fromPeer(n)
					case 'w':
						time.Sleep(time.Duration(n) * time.Second)
					case 'e':
						u.peerEnded()
					}
				}
				if got := u.awaits(limit) > 0; got != tc.want {
					t.Errorf("%s: awaits %v, want %v", tc.story, got, tc.want)
				}
			})
		})
	}
}

func TestUsageSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var u usage
		u.begin()
		time.Sleep(time.Minute)
		if got := u.silence(); got != time.Minute {
			t.Errorf("a fresh flow was silent for %v, want 1m", got)
		}
		u.pass()
		time.Sleep(time.Second)
		if got := u.silence(); got != time.Second {
			t.Errorf("silent for %v, want 1s", got)
		}
	})
}

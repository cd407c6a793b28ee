package shim

import (
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/miekg/dns"

	"github.com/hibernacle/hibernacle/internal/vnet"
	"github.com/hibernacle/hibernacle/internal/vnet/vnettest"
)

// echoServer is a service on the host's loopback.
func echoServer(t *testing.T) (port int) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				_, _ = io.Copy(c, c)
				c.Close()
			})
		}
	})
	t.Cleanup(func() { ln.Close(); serving.Wait() })
	return ln.Addr().(*net.TCPAddr).Port
}

// card joins a guest's network card to the machine.
func (r *rig) card() *vnettest.Guest {
	r.t.Helper()
	g, err := vnettest.Join(filepath.Join(r.cfg.Dir, "net"))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(g.Close)
	return g
}

func (r *rig) setEgress(req EgressRequest) {
	r.t.Helper()
	if err := r.client.SetEgress(context.Background(), req); err != nil {
		r.t.Fatal(err)
	}
}

// told gathers what the shim's events tell of denied attempts.
func (r *rig) told() func() []Denied {
	ctx, stop := context.WithCancel(context.Background())
	var mu sync.Mutex
	var all []Denied
	var watching sync.WaitGroup
	watching.Go(func() {
		_ = r.client.Watch(ctx, func(e Event) {
			mu.Lock()
			defer mu.Unlock()
			if e.Denied != nil {
				all = append(all, *e.Denied)
			}
		})
	})
	r.t.Cleanup(func() { stop(); watching.Wait() })
	return func() []Denied {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(all)
	}
}

// TestEgress: a policy is in force from the first packet, is changed under open
// connections and during a capture, and what it denies is told.
func TestEgress(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.prepare(true)
	g, told := r.card(), r.told()
	address := fmt.Sprintf("%s:%d", vnet.HostIP, echoServer(t))
	dial := func() (net.Conn, error) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		return g.Dial(ctx, "tcp", address)
	}
	if c, err := dial(); err == nil {
		c.Close()
		t.Fatal("a machine that is nobody's reached the host")
	}
	boot := bootRequest()
	boot.Attach.Profile, boot.Attach.Allow = "allow-list", []string{fmt.Sprintf("127.0.0.1/32:%s", address[len(vnet.HostIP)+1:])}
	if _, err := r.client.Boot(context.Background(), boot); err != nil {
		t.Fatal(err)
	}
	open, err := dial()
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()

	wantCode(t, r.client.SetEgress(context.Background(), EgressRequest{Allow: []string{"not a rule!"}}), CodeInvalid, "not a rule!")
	wantCode(t, r.client.SetEgress(context.Background(), EgressRequest{Profile: "some"}), CodeInvalid, "some")
	if _, err := open.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(open, make([]byte, 1)); err != nil {
		t.Fatalf("after a policy that cannot be read: %v", err)
	}

	r.setEgress(EgressRequest{Profile: "none"})
	if _, err := open.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("the open connection got %v, want a reset", err)
	}
	for range 3 {
		if c, err := dial(); err == nil {
			c.Close()
			t.Fatal("the policy is not in force")
		}
	}
	eventually(t, "the attempts are told", func() bool {
		var n int64
		for _, d := range told() {
			if d.Proto == "tcp" && fmt.Sprintf("%s:%d", d.Addr, d.Port) == address {
				n += d.Count
			}
		}
		return n == 4 // with that before the boot
	})

	r.capture(5)
	r.setEgress(EgressRequest{Allow: boot.Attach.Allow})
	r.thaw(5)
	again, err := dial()
	if err != nil {
		t.Fatalf("after a policy that was set while the guest was sealed: %v", err)
	}
	again.Close()
}

// TestDeniedNames: a question that is refused is told, too.
func TestDeniedNames(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.boot()
	r.setEgress(EgressRequest{Profile: "none"})
	told := r.told()
	conn, err := r.card().Dial(context.Background(), "tcp", vnet.GatewayIP+":53")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := dns.Client{Net: "tcp", Timeout: patience}
	query := new(dns.Msg).SetQuestion("Secret.example.", dns.TypeA)
	if reply, _, err := client.ExchangeWithConn(query, &dns.Conn{Conn: conn}); err != nil || reply.Rcode != dns.RcodeRefused {
		t.Fatalf("got %v, %v", reply, err)
	}
	eventually(t, "it is told", func() bool { return slices.Contains(told(), Denied{Proto: "dns", Name: "secret.example", Count: 1}) })
}

// TestDenials: whatever a guest does, what is told stays short and complete.
func TestDenials(t *testing.T) {
	d := newDenials()
	if got := d.take(); got != nil {
		t.Errorf("at first: %v", got)
	}
	for i := range 100 * maxDenied {
		d.add(vnet.Denied{Proto: "dns", Name: fmt.Sprintf("n%d.test", i%(2*maxDenied))})
	}
	<-d.wake
	got := d.take()
	if len(got) != maxDenied+1 || got[0] != (Denied{Proto: "dns", Name: "n0.test", Count: 50}) || got[maxDenied].Proto != DeniedOther {
		t.Errorf("got %+v", got)
	}
	var sum int64
	for _, each := range got {
		sum += each.Count
	}
	if sum != 100*maxDenied {
		t.Errorf("%d attempts are told", sum)
	}
	if got := d.take(); got != nil {
		t.Errorf("told twice: %v", got)
	}
}

package e2e

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/hibernacle/hibernacle/test/hibtest"
)

// outside plays the public internet: addresses that lead to this process, and
// the DNS server that names them. No packet leaves the host.
type outside struct {
	good, evil string // addresses with an echo server each
	port       int    // of both
	dns        string // address of the DNS server
	accepted   chan net.Conn
}

// publicRange is taken for the addresses. Nothing here depends on whose they are.
const publicRange = "45.67.89.0/28"

func newOutside(t *testing.T) *outside {
	t.Helper()
	if out, err := exec.Command("ip", "route", "add", "local", publicRange, "dev", "lo").CombinedOutput(); err != nil {
		t.Skipf("needs addresses that look public: ip route: %v: %s", err, out)
	}
	t.Cleanup(func() { _ = exec.Command("ip", "route", "del", "local", publicRange, "dev", "lo").Run() })
	o := &outside{good: "45.67.89.1", evil: "45.67.89.2", accepted: make(chan net.Conn, 100)}
	var serving sync.WaitGroup
	t.Cleanup(serving.Wait) // behind what ends them
	for _, addr := range []string{o.good, o.evil} {
		ln, err := net.Listen("tcp", fmt.Sprintf("%s:%d", addr, o.port))
		if err != nil {
			t.Fatal(err)
		}
		o.port = ln.Addr().(*net.TCPAddr).Port
		serving.Go(func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				o.accepted <- c
			}
		})
		t.Cleanup(func() { ln.Close() })
	}
	names := map[string]string{
		"www.good.test.": o.good, "evil.test.": o.evil,
		"loop.good.test.": "127.0.0.1", "host.good.test.": "192.168.127.254",
	}
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan struct{})
	server := &dns.Server{PacketConn: pc, NotifyStartedFunc: func() { close(started) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		reply := new(dns.Msg).SetReply(q)
		addr, ok := names[strings.ToLower(q.Question[0].Name)]
		switch {
		case !ok:
			reply.Rcode = dns.RcodeNameError
		case q.Question[0].Qtype == dns.TypeA:
			reply.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 5}, A: net.ParseIP(addr)}}
		}
		_ = w.WriteMsg(reply)
	})}
	serving.Go(func() { _ = server.ActivateAndServe() })
	<-started
	t.Cleanup(func() { _ = server.Shutdown() })
	o.dns = pc.LocalAddr().String()
	return o
}

// tryScript connects to each HOST:PORT of its arguments and prints how that went.
const tryScript = `
import socket, sys
for arg in sys.argv[1:]:
    host, port = arg.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=60).close()
        print("open")
    except socket.gaierror:
        print("unknown")
    except ConnectionRefusedError:
        print("refused")
    except OSError as e:
        print(e)
`

// TestEgressByName: an allow-list of names opens what the names are answered
// with and nothing else, whatever the guest tries, before and after sleep; what
// it tries in vain is told.
func TestEgressByName(t *testing.T) {
	o := newOutside(t)
	d := hibtest.StartWith(t, []string{"--dns", o.dns, "--log-level", "debug"})
	id := d.Create("--memory", "512", "--idle-timeout", "never", "--egress", "allow-list", "--allow", "*.good.test")
	d.WriteFile(id, "/home/user/try.py", []byte(tryScript))
	try := func(hosts ...string) string {
		t.Helper()
		args := []string{"exec", id, "--", "python3", "/home/user/try.py"}
		for _, h := range hosts {
			args = append(args, fmt.Sprintf("%s:%d", h, o.port))
		}
		return strings.Join(strings.Fields(d.Hib(args...)), " ")
	}
	check := func(when, want string, hosts ...string) {
		t.Helper()
		if got := try(hosts...); got != want {
			t.Errorf("%s: %q to %v, want %q", when, got, hosts, want)
		}
	}
	check("at first", "refused refused unknown", o.good, o.evil, "evil.test")
	check("by its name", "open open refused", "www.good.test", o.good, o.evil)
	check("rebinding", "refused refused refused", "host.good.test", "loop.good.test", "host.hib.internal")
	hibtest.Eventually(t, "what was denied is told", func() bool {
		log := d.Log()
		return strings.Contains(log, "type=denied") && strings.Contains(log, "evil.test") && strings.Contains(log, o.evil)
	})

	d.Hib("hibernate", id)
	d.Hib("resume", id)
	check("after sleep", "refused open", o.evil, "www.good.test")
	d.Hib("hibernate", id)
	d.Hib("update", id, "--egress", "none")
	check("changed in its sleep", "unknown refused", "www.good.test", o.good)
	d.Hib("update", id, "--egress", "internet", "--allow", "", "--deny", "evil.test")
	check("a name denied", "unknown open", "evil.test", "www.good.test")
	d.Restart()
	check("after a restart of the daemon", "unknown open", "evil.test", "www.good.test")
}

// TestEgressChangedUnderAConnection: a new policy cuts the connections that it
// denies, on both sides at once, and leaves the others.
func TestEgressChangedUnderAConnection(t *testing.T) {
	o := newOutside(t)
	d := hibtest.StartWith(t, []string{"--dns", o.dns})
	id := d.Create("--memory", "512", "--idle-timeout", "never")
	d.WriteFile(id, "/home/user/client.py", []byte(`
import socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
try:
    while True:
        got = s.recv(100)
        print("closed" if not got else got.decode(), file=open("/home/user/" + sys.argv[3], "a"), flush=True)
        if not got:
            break
except ConnectionResetError:
    print("reset", file=open("/home/user/" + sys.argv[3], "a"))
`))
	connect := func(host, file string) net.Conn {
		t.Helper()
		d.Hib("exec", "-d", id, "--", "python3", "/home/user/client.py", host, fmt.Sprint(o.port), file)
		select {
		case c := <-o.accepted:
			t.Cleanup(func() { c.Close() })
			return c
		case <-time.After(hibtest.Patience):
			t.Fatalf("nobody connects to %s", host)
			return nil
		}
	}
	kept, cut := connect("www.good.test", "kept"), connect("evil.test", "cut")
	d.Hib("update", id, "--egress", "allow-list", "--allow", "www.good.test")

	if err := cut.SetReadDeadline(time.Now().Add(hibtest.Patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := cut.Read(make([]byte, 1)); err == nil || err == io.EOF || os.IsTimeout(err) {
		t.Errorf("the peer of what is denied now got %v, want a reset", err)
	}
	wrote := func(file, want string) {
		t.Helper()
		hibtest.Eventually(t, file+" has "+want, func() bool {
			out, _, code := d.Try("exec", id, "--", "cat", "/home/user/"+file)
			return code == 0 && strings.TrimSpace(out) == want
		})
	}
	wrote("cut", "reset")
	if _, err := kept.Write([]byte("still-here")); err != nil {
		t.Fatal(err)
	}
	wrote("kept", "still-here")
}

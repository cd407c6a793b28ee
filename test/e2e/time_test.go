package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/test/hibtest"
)

// TestTLSAfterAMonth: a sandbox that wakes in a month trusts a certificate that
// is made then, at once; its monotonic clock did not jump.
func TestTLSAfterAMonth(t *testing.T) {
	const month = 30 * 24 * time.Hour
	cert := certificate(t, time.Now().Add(month-time.Hour), time.Now().Add(month+24*time.Hour))
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }))
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{cert}}
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	defer srv.Close()
	_, port, err := net.SplitHostPort(srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	d := hibtest.StartBare(t)
	id := d.Create("--memory", "512", "--allow", "host:"+port)
	d.WriteFile(id, "/home/user/ca.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Certificate[0]}))
	fetch := "curl -sS --cacert ca.pem https://host.hib.internal:" + port
	if out, stderr, code := d.Try("exec", id, "--", "bash", "-c", fetch); code == 0 || !strings.Contains(stderr, "certificate") {
		t.Fatalf("a certificate of the future was taken: %q %q", out, stderr)
	}
	monotonic := func() [2]float64 {
		t.Helper()
		out := strings.Fields(d.Shell(id, "python3 -c 'import time; print(time.clock_gettime(time.CLOCK_MONOTONIC), time.clock_gettime(time.CLOCK_BOOTTIME))'"))
		var at [2]float64
		for i := range at {
			v, err := strconv.ParseFloat(out[i], 64)
			if err != nil {
				t.Fatal(err)
			}
			at[i] = v
		}
		return at
	}
	boot := d.Shell(id, "cat /proc/sys/kernel/random/boot_id")
	before := monotonic()
	d.Hib("hibernate", id)
	d.Restart("HIB_FAILPOINT_CLOCK=" + month.String())
	if got := d.Shell(id, fetch); got != "hello" { // wakes it
		t.Errorf("got %q", got)
	}
	after := monotonic()
	for i, name := range []string{"CLOCK_MONOTONIC", "CLOCK_BOOTTIME"} {
		if gone := after[i] - before[i]; gone < 0 || gone > (24*time.Hour).Seconds() {
			t.Errorf("%s went on by %.0f s", name, gone)
		}
	}
	if now := d.Shell(id, "cat /proc/sys/kernel/random/boot_id"); now != boot {
		t.Errorf("a resume changed the boot id from %s to %s", boot, now)
	}
}

func certificate(t *testing.T, from, to time.Time) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "host.hib.internal"}, DNSNames: []string{"host.hib.internal"},
		NotBefore: from, NotAfter: to, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// TestAClockTenYearsOff: what a guest does to its clock ends with its next
// resume, and a host whose clock was set back loses nothing.
func TestAClockTenYearsOff(t *testing.T) {
	d := hibtest.StartBare(t)
	id := d.Create("--memory", "512")
	for _, off := range []string{"+10 years", "-10 years"} {
		d.Shell(id, "sudo date -s '"+off+"'")
		d.Hib("hibernate", id)
		checkClock(t, d, id)
	}
	d.Hib("hibernate", id)
	d.Restart("HIB_FAILPOINT_CLOCK=-87600h")
	if got := d.Shell(id, "date +%Y"); got >= strconv.Itoa(time.Now().Year()-8) {
		t.Errorf("the guest of a host that lives ten years ago lives in %s", got)
	}
	d.Hib("hibernate", id)
	d.Restart()
	checkClock(t, d, id)
}

// TestANetworkThatIsTakenDown: the agent brings it back, awake and across a
// hibernation that comes meanwhile.
func TestANetworkThatIsTakenDown(t *testing.T) {
	d := hibtest.StartBare(t)
	id := d.Create("--memory", "512")
	for _, damage := range []string{
		"ip link set eth0 down", "ip addr flush dev eth0", "ip route flush table main", "ip route flush table local",
		"while sleep 0.05; do ip link set eth0 down; done",
	} {
		d.Hib("exec", "-d", id, "--", "sudo", "bash", "-c", "sleep 0.2; "+damage)
		d.Hib("hibernate", id)
		d.Hib("resume", id)
		if got := d.Shell(id, "sudo pkill -f '[i]p link set eth0' ; echo back"); got != "back" {
			t.Errorf("after %s: %q", damage, got)
		}
	}
	if got := d.Shell(id, "ip route show default"); !strings.Contains(got, "192.168.127.1") {
		t.Errorf("the default route is %q", got)
	}
}

// TestAnAgentThatCannotBeReached: a guest that shuts the agent off hibernates
// all the same, and says so; the sandbox and its snapshot stay.
func TestAnAgentThatCannotBeReached(t *testing.T) {
	d := hibtest.StartBare(t)
	id := d.Create("--memory", "512")
	d.Hib("exec", "-d", id, "--", "sudo", "bash", "-c", "sleep 1; echo virtio0 > /dev/null; for i in /sys/class/net/eth0/device/driver/virtio*; do basename $i > /sys/class/net/eth0/device/driver/unbind; done")
	hibtest.Eventually(t, "the guest is cut off", func() bool {
		_, _, code := d.Try("exec", id, "--", "ip", "link", "show", "eth0")
		return code != 0
	})
	sb := d.Hibernate(id)
	if w := strings.Join(sb.LastHibernate.Warnings, " "); !strings.Contains(w, "did not answer") {
		t.Errorf("warnings: %s", w)
	}
	_, stderr, code := d.Try("resume", id)
	t.Logf("resume says: %s", stderr)
	if code == 0 || !strings.Contains(stderr, "agent") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if now := d.Inspect(id); now.Snapshot == nil || now.Snapshot.ID != sb.Snapshot.ID {
		t.Errorf("the sandbox is %s with snapshot %+v", now.State, now.Snapshot)
	}
}

package guest

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/hibernacle/hibernacle/internal/guestapi"
)

type header map[string]string

func (g *guestUnderTest) do(t *testing.T, method, path string, body io.Reader, h header) (*http.Response, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(testContext(t), method, guestapi.BaseURL+path, body)
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range h {
		r.Header.Set(k, v)
	}
	resp, err := g.http.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(raw)
}

var octets = header{"Content-Type": "application/octet-stream"}

func form(t *testing.T, files ...[2]string) (io.Reader, header) {
	t.Helper()
	var body bytes.Buffer
	w := multipart.NewWriter(&body)
	for _, f := range files {
		h := textproto.MIMEHeader{}
		h.Set("Content-Disposition", fmt.Sprintf(`form-data; name="file"; filename=%q`, f[0]))
		part, err := w.CreatePart(h)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(part, f[1])
	}
	w.Close()
	return &body, header{"Content-Type": w.FormDataContentType()}
}

func TestUploadAndDownload(t *testing.T) {
	g := newGuest(t, nil)
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	z.Write([]byte("zipped"))
	z.Close()
	for _, c := range []struct {
		name, path, want string
		body             io.Reader
		header           header
	}{
		{"octet stream", "a/b/octets", "content", strings.NewReader("content"), octets},
		{"gzip", "zip", "zipped", &zipped, header{"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}},
		{"empty", "empty", "", strings.NewReader(""), octets},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp, body := g.do(t, "POST", "/files?path="+c.path, c.body, c.header)
			want := fmt.Sprintf(`[{"name":%q,"path":%q,"type":"file"}]`, filepath.Base(c.path), g.home+"/"+c.path)
			if resp.StatusCode != 200 || strings.TrimSpace(body) != want {
				t.Fatalf("%d %s, want %s", resp.StatusCode, body, want)
			}
			if resp, got := g.do(t, "GET", "/files?path="+c.path, nil, nil); resp.StatusCode != 200 || got != c.want {
				t.Errorf("%d %q", resp.StatusCode, got)
			}
			if owner := ownerOf(t, filepath.Join(g.home, c.path)); owner != 65534 {
				t.Errorf("it belongs to %d", owner)
			}
		})
	}
	if owner := ownerOf(t, filepath.Join(g.home, "a/b")); owner != 65534 {
		t.Errorf("the folder belongs to %d", owner)
	}
}

func TestUploadOfAForm(t *testing.T) {
	g := newGuest(t, nil)
	body, h := form(t, [2]string{"one", "1"}, [2]string{"sub/two", "2"}, [2]string{g.home + "/three", "3"})
	resp, answer := g.do(t, "POST", "/files", body, h)
	var files []uploaded
	if err := json.Unmarshal([]byte(answer), &files); err != nil || resp.StatusCode != 200 || len(files) != 3 {
		t.Fatalf("%d %s", resp.StatusCode, answer)
	}
	for i, path := range []string{"one", "sub/two", "three"} {
		if files[i].Path != g.home+"/"+path || readFile(t, files[i].Path) != fmt.Sprint(i+1) {
			t.Errorf("%+v", files[i])
		}
	}
	body, h = form(t, [2]string{"ignored", "named"})
	if resp, answer := g.do(t, "POST", "/files?path=chosen&username=root", body, h); resp.StatusCode != 200 || !strings.Contains(answer, `"/root/chosen"`) {
		t.Errorf("%d %s", resp.StatusCode, answer)
	}
	os.Remove("/root/chosen")
	body, h = form(t, [2]string{"x", "1"}, [2]string{"y", "2"})
	if resp, answer := g.do(t, "POST", "/files?path=chosen", body, h); resp.StatusCode != 400 {
		t.Errorf("two files at one path: %d %s", resp.StatusCode, answer)
	}
}

func TestUploadKeepsWhatAFileIs(t *testing.T) {
	g := newGuest(t, nil)
	path := filepath.Join(g.home, "script")
	writeFile(t, path, "a long old content")
	if err := os.Chmod(path, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("script", filepath.Join(g.home, "link")); err != nil {
		t.Fatal(err)
	}
	if resp, body := g.do(t, "POST", "/files?path=link", strings.NewReader("new"), octets); resp.StatusCode != 200 {
		t.Fatal(body)
	}
	info, err := os.Lstat(path)
	if err != nil || readFile(t, path) != "new" || info.Mode() != 0o750 || ownerOf(t, path) != 0 {
		t.Errorf("%v %q, %v", info.Mode(), readFile(t, path), err)
	}
}

func TestBrokenUploadLeavesNoNewFile(t *testing.T) {
	g := newGuest(t, nil)
	whole, h := form(t, [2]string{"f", strings.Repeat("x", 1000)})
	resp, body := g.do(t, "POST", "/files", io.LimitReader(whole, 800), h)
	if resp.StatusCode == 200 {
		t.Fatalf("%s", body)
	}
	if _, err := os.Stat(filepath.Join(g.home, "f")); err == nil {
		t.Error("a part of the file is left")
	}
}

func TestTransferErrors(t *testing.T) {
	g := newGuest(t, nil)
	if err := os.Mkdir(filepath.Join(g.home, "dir"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		method, query string
		header        header
		want          int
	}{
		{"GET", "path=missing", nil, 404},
		{"GET", "path=dir", nil, 400},
		{"GET", "path=/dev/zero", nil, 400},
		{"GET", "path=x&username=ghost", nil, 401},
		{"POST", "path=dir", octets, 400},
		{"POST", "", octets, 400},
		{"POST", "path=x", header{"Content-Type": "text/plain"}, 400},
		{"POST", "path=x", header{}, 400},
		{"POST", "path=x", header{"Content-Type": "application/octet-stream", "Content-Encoding": "br"}, 400},
		{"POST", "path=x", header{"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}, 400},
		{"POST", "path=/dev/full", octets, 507},
	} {
		resp, body := g.do(t, c.method, "/files?"+c.query, strings.NewReader("body"), c.header)
		var e apiError
		if resp.StatusCode != c.want || json.Unmarshal([]byte(body), &e) != nil || e.Code != c.want || e.Message == "" {
			t.Errorf("%s %s %v: %d %s, want %d", c.method, c.query, c.header, resp.StatusCode, body, c.want)
		}
	}
}

func TestDownloadOfARange(t *testing.T) {
	g := newGuest(t, nil)
	writeFile(t, filepath.Join(g.home, "f"), "0123456789")
	resp, body := g.do(t, "GET", "/files?path=f", nil, header{"Range": "bytes=2-4"})
	if resp.StatusCode != 206 || body != "234" {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
}

func TestSignedURLs(t *testing.T) {
	g := newGuest(t, nil)
	g.agent.setIdentity(&guestapi.Identity{AccessToken: "secret"})
	writeFile(t, filepath.Join(g.home, "f"), "content")
	sign := func(fields ...string) string {
		sum := sha256.Sum256([]byte(strings.Join(fields, ":")))
		return "v1_" + strings.TrimRight(base64.StdEncoding.EncodeToString(sum[:]), "=")
	}
	future, past := fmt.Sprint(time.Now().Unix()+3600), fmt.Sprint(time.Now().Unix()-10)
	for _, c := range []struct {
		name, method string
		query        url.Values
		want         int
	}{
		{"none", "GET", url.Values{}, 401},
		{"read", "GET", url.Values{"signature": {sign("f", "read", "", "secret")}}, 200},
		{"user", "GET", url.Values{"username": {"user"}, "signature": {sign("f", "read", "user", "secret")}}, 200},
		{"expiring", "GET", url.Values{"signature": {sign("f", "read", "", "secret", future)}, "signature_expiration": {future}}, 200},
		{"expired", "GET", url.Values{"signature": {sign("f", "read", "", "secret", past)}, "signature_expiration": {past}}, 401},
		{"prolonged", "GET", url.Values{"signature": {sign("f", "read", "", "secret", past)}, "signature_expiration": {future}}, 401},
		{"no time", "GET", url.Values{"signature": {sign("f", "read", "", "secret", "x")}, "signature_expiration": {"x"}}, 401},
		{"other token", "GET", url.Values{"signature": {sign("f", "read", "", "guess")}}, 401},
		{"read for write", "POST", url.Values{"signature": {sign("f", "read", "", "secret")}}, 401},
		{"write", "POST", url.Values{"signature": {sign("f", "write", "", "secret")}}, 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.query.Set("path", "f")
			if resp, body := g.do(t, c.method, "/files?"+c.query.Encode(), strings.NewReader("x"), octets); resp.StatusCode != c.want {
				t.Errorf("%d %s", resp.StatusCode, body)
			}
		})
	}
}

func TestMetricsAndEnvs(t *testing.T) {
	g := newGuest(t, nil)
	g.agent.setIdentity(&guestapi.Identity{Env: map[string]string{"A": "b"}})
	_, body := g.do(t, "GET", "/envs", nil, nil)
	if strings.TrimSpace(body) != `{"A":"b"}` {
		t.Errorf("envs %s", body)
	}
	_, body = g.do(t, "GET", "/metrics", nil, nil)
	var u usage
	if err := json.Unmarshal([]byte(body), &u); err != nil {
		t.Fatal(err)
	}
	if u.CPUCount < 1 || u.CPUUsed < 0 || u.CPUUsed > 100 || u.MemTotal == 0 || u.MemUsed == 0 || u.MemUsed > u.MemTotal ||
		u.DiskTotal == 0 || u.DiskUsed > u.DiskTotal || time.Since(time.Unix(u.Timestamp, 0)).Abs() > patience {
		t.Errorf("metrics %s", body)
	}
}

// BenchmarkUpload measures uploads of 1 GiB to a device that drops them, and
// how much memory they take.
func BenchmarkUpload(b *testing.B) {
	g := newGuest(b, nil)
	const size = 1 << 30
	b.SetBytes(size)
	for b.Loop() {
		r, err := http.NewRequest("POST", guestapi.BaseURL+"/files?path=/dev/null", io.LimitReader(zeros{}, size))
		if err != nil {
			b.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/octet-stream")
		resp, err := g.http.Do(r)
		if err != nil || resp.StatusCode != 200 {
			b.Fatal(resp, err)
		}
		resp.Body.Close()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	b.ReportMetric(float64(m.Sys)/(1<<20), "MiB-of-process")
}

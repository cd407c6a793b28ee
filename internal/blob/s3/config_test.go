package s3

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// noEnvironment unsets what ParseURL reads.
func noEnvironment(t testing.TB) {
	for _, name := range []string{"AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"} {
		t.Setenv(name, "")
	}
}

func TestParseURL(t *testing.T) {
	noEnvironment(t)
	for address, want := range map[string]Config{
		"s3://bucket":      {Bucket: "bucket", Region: "us-east-1"},
		"s3://bucket/":     {Bucket: "bucket", Region: "us-east-1"},
		"s3://bucket/a/b/": {Bucket: "bucket", Prefix: "a/b", Region: "us-east-1"},
		"s3://bucket?region=eu-1&path-style=true":         {Bucket: "bucket", Region: "eu-1", PathStyle: true},
		"s3://bucket/p?endpoint=https://host:9000":        {Bucket: "bucket", Prefix: "p", Region: "us-east-1", Endpoint: "https://host:9000", PathStyle: true},
		"s3://bucket?endpoint=http%3A%2F%2F%5B::1%5D:9/":  {Bucket: "bucket", Region: "us-east-1", Endpoint: "http://[::1]:9", PathStyle: true},
		"s3://bucket?endpoint=https://h&path-style=false": {Bucket: "bucket", Region: "us-east-1", Endpoint: "https://h"},
		"s3://bucket?timeout=3s":                          {Bucket: "bucket", Region: "us-east-1", Timeout: 3 * time.Second},
	} {
		got, err := ParseURL(address)
		if err != nil || got != want {
			t.Errorf("ParseURL %s = %v, %v; want %v", address, got, err, want)
		}
		if again, err := ParseURL(got.String()); err != nil || again != got {
			t.Errorf("%s became %s: %v, %v", address, got, again, err)
		}
	}
}

func TestParseURLRefuses(t *testing.T) {
	noEnvironment(t)
	for address, word := range map[string]string{
		"":                          "s3://",
		"bucket/prefix":             "s3://",
		"https://bucket":            "s3://",
		"s3:bucket":                 "only a bucket",
		"s3://":                     "bucket",
		"s3://UP/":                  "bucket",
		"s3://b":                    "bucket",
		"s3://key:hidden@bucket":    "AWS_ACCESS_KEY_ID",
		"s3://key:hidden%zz@bucket": "",
		"s3://bucket/a//b":          "prefix",
		"s3://bucket/../b":          "prefix",
		"s3://bucket/a%00":          "prefix",
		"s3://bucket/" + strings.Repeat("x", 600): "prefix",
		"s3://bucket#f":                           "only a bucket",
		"s3://bucket?reigon=x":                    "reigon",
		"s3://bucket?region=a&region=b":           "more than once",
		"s3://bucket?endpoint=host:9000":          "endpoint",
		"s3://bucket?endpoint=ftp://host":         "endpoint",
		"s3://bucket?endpoint=https://host/path":  "endpoint",
		"s3://bucket?endpoint=https://a:hidden@h": "endpoint",
		"s3://bucket?path-style=maybe":            "path-style",
		"s3://bucket?timeout=fast":                "timeout",
		"s3://bucket?timeout=-1s":                 "timeout",
	} {
		got, err := ParseURL(address)
		if err == nil || !strings.Contains(err.Error(), word) || strings.Contains(err.Error(), "hidden") || got != (Config{}) {
			t.Errorf("ParseURL %s = %v, %v", address, got, err)
		}
	}
}

func TestParseURLReadsTheEnvironment(t *testing.T) {
	noEnvironment(t)
	t.Setenv("AWS_DEFAULT_REGION", "eu-2")
	t.Setenv("AWS_ACCESS_KEY_ID", "id")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "hidden")
	t.Setenv("AWS_SESSION_TOKEN", "token")
	want := Config{Bucket: "bucket", Region: "eu-2", AccessKey: "id", SecretKey: "hidden", SessionToken: "token"}
	if got, err := ParseURL("s3://bucket"); err != nil || got != want {
		t.Errorf("got %v, %v", got, err)
	}
	t.Setenv("AWS_REGION", "eu-1")
	if got, err := ParseURL("s3://bucket"); err != nil || got.Region != "eu-1" {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestConfigShowsNoSecretsButCarriesThem(t *testing.T) {
	cfg := Config{Bucket: "bucket", Region: "r", AccessKey: "hidden-id", SecretKey: "hidden", SessionToken: "hidden-token", Timeout: time.Second}
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).Info("open", "store", cfg)
	for _, shown := range []string{cfg.String(), fmt.Sprintf("%v %+v %#v %s", cfg, cfg, cfg, cfg), fmt.Sprintf("%v %+v", &cfg, []Config{cfg}), log.String()} {
		if strings.Contains(shown, "hidden") || !strings.Contains(shown, "s3://bucket") {
			t.Errorf("shown: %s", shown)
		}
	}
	b, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	var got Config
	if err := json.Unmarshal(b, &got); err != nil || got != cfg {
		t.Errorf("through JSON: %v, %v", got, err)
	}
}

func TestOpenNeedsCredentials(t *testing.T) {
	if _, err := Open(t.Context(), Config{Bucket: "bucket"}); err == nil || !strings.Contains(err.Error(), "AWS_ACCESS_KEY_ID") {
		t.Errorf("Open: %v", err)
	}
}

func FuzzParseURL(f *testing.F) {
	noEnvironment(f)
	for _, s := range []string{"s3://bucket", "s3://bucket/a/b?endpoint=http://h:1&region=r&path-style=false&timeout=1m", "s3://b%20/%2f?x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, address string) {
		cfg, err := ParseURL(address)
		if err != nil {
			return
		}
		if again, err := ParseURL(cfg.String()); err != nil || again != cfg {
			t.Errorf("%q became %q: %#v, %v", address, cfg, again, err)
		}
	})
}

func FuzzParseContentRange(f *testing.F) {
	for _, s := range []string{"bytes 0-9/10", "bytes 5-14/100", "bytes */0", "bytes 9-0/10", "bytes 0-9/5"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, header string) {
		start, length, size, err := parseContentRange(header)
		if err == nil && (start < 0 || length < 1 || start > size-length) {
			t.Errorf("%q: %d bytes at %d of %d", header, length, start, size)
		}
	})
}

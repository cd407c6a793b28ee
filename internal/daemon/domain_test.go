package daemon

import (
	"net"
	"testing"
)

func TestParseDomain(t *testing.T) {
	listener := &net.TCPAddr{Port: 7070}
	for _, tt := range []struct{ text, url string }{
		{"", "http://{port}-{id}.localhost:7070/"},
		{"sandboxes.example.com", "http://{port}-{id}.sandboxes.example.com:7070/"},
		{"sandboxes.example.com:80", "http://{port}-{id}.sandboxes.example.com:80/"},
		{"https://sandboxes.example.com", "https://{port}-{id}.sandboxes.example.com/"},
		{"https://sandboxes.example.com:8443", "https://{port}-{id}.sandboxes.example.com:8443/"},
		{"https://", ""},
		{"ftp://example.com", ""},
		{"a_b.example.com", ""},
		{".example.com", ""},
		{"example.com/path", ""},
	} {
		r, err := parseDomain(tt.text, listener)
		if (err == nil) != (tt.url != "") || err == nil && r.portURL() != tt.url {
			t.Errorf("%q: %q, %v; want %q", tt.text, r.portURL(), err, tt.url)
		}
	}
}

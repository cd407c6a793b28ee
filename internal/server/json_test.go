package server

import (
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/api"
)

// FuzzDecode makes sure that every body is either taken or refused in words.
func FuzzDecode(f *testing.F) {
	for _, body := range []string{``, `{}`, `{"name":"x"}`, `{"nam":1}`, "{\n\"memory_mib\":\"x\"}", `[]`, `{} x`, `{"policy":{"a":1}}`, `{"name":`, "\xff"} {
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body string) {
		var v api.CreateRequest
		err := decode(httptest.NewRecorder(), httptest.NewRequest("POST", "/", strings.NewReader(body)), &v)
		if err == nil {
			return
		}
		if status, _ := classify(err); status != 400 && status != 413 || err.Error() == "" {
			t.Errorf("%q: %d %v", body, status, err)
		}
	})
}

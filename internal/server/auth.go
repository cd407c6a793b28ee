package server

import (
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"slices"
	"strings"
)

// keyHeader and "Authorization: Bearer" are the two ways to show the key.
const keyHeader = "X-API-Key"

// authenticate lets a request through to next if it shows key. It guards every
// path but the open ones, unknown ones too. A page in a browser that
// reaches the listener (by DNS rebinding, say) has no key, so the Host header
// needs no check of its own.
func (s *Server) authenticate(key string, open []string, next http.Handler) http.Handler {
	want := sha256.Sum256([]byte(key))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if slices.Contains(open, r.URL.Path) {
			next.ServeHTTP(w, r)
			return
		}
		// Hashing makes the comparison's time independent of the length, too.
		got := sha256.Sum256([]byte(shownKey(r)))
		if key == "" || subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			w.Header().Set("WWW-Authenticate", `Bearer realm="hibernacle"`)
			s.fail(w, r, errUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// shownKey returns the key that a request shows, "" if none.
func shownKey(r *http.Request) string {
	if k := r.Header.Get(keyHeader); k != "" {
		return k
	}
	return bearer(r.Header)
}

// bearer returns the token of an "Authorization: Bearer" header, "" if there
// is none.
func bearer(h http.Header) string {
	scheme, token, _ := strings.Cut(h.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

package s3_test

import (
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/s3"
)

// service answers as a service that the server of the other tests is not.
func service(t *testing.T, answer http.HandlerFunc) *s3.Store {
	t.Helper()
	server := httptest.NewServer(answer)
	t.Cleanup(server.Close)
	return open(t, s3.Config{Bucket: "bucket", Endpoint: server.URL, PathStyle: true, AccessKey: "id", SecretKey: "secret"})
}

func fail(w http.ResponseWriter, status int, code string) {
	w.WriteHeader(status)
	fmt.Fprintf(w, "<Error><Code>%s</Code><Message>by order</Message></Error>", code)
}

func TestAnswers(t *testing.T) {
	for _, c := range []struct {
		status int
		code   string
		want   error
	}{
		{404, "NoSuchKey", blob.ErrNotExist},
		{404, "NoSuchBucket", blob.ErrRefused},
		{404, "NoSuchPage", blob.ErrRefused},
		{401, "Unauthorized", blob.ErrRefused},
		{403, "AccessDenied", blob.ErrRefused},
		{403, "ExpiredToken", blob.ErrRefused},
		{400, "ExpiredToken", blob.ErrRefused},
		{403, "RequestTimeTooSkewed", blob.ErrRefused},
		{400, "AuthorizationHeaderMalformed", blob.ErrRefused},
		{400, "InvalidRequest", blob.ErrRefused},
		{501, "NotImplemented", blob.ErrRefused},
		{400, "RequestTimeout", blob.ErrUnavailable},
		{400, "BadDigest", blob.ErrUnavailable},
		{408, "Slow", blob.ErrUnavailable},
		{409, "ConditionalRequestConflict", blob.ErrUnavailable},
		{429, "SlowDown", blob.ErrUnavailable},
		{500, "InternalError", blob.ErrUnavailable},
		{503, "SlowDown", blob.ErrUnavailable},
		{507, "XMinioStorageFull", blob.ErrNoSpace},
		{403, "QuotaExceeded", blob.ErrNoSpace},
	} {
		s := service(t, func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			fail(w, c.status, c.code)
		})
		_, openErr := s.Open(t.Context(), "a")
		_, putErr := s.Put(t.Context(), "a", writes([]byte("x")))
		for op, err := range map[string]error{"Open": openErr, "Put": putErr} {
			if !errors.Is(err, c.want) || errors.Is(err, blob.ErrRefused) != (c.want == blob.ErrRefused) || !strings.Contains(err.Error(), c.code) {
				t.Errorf("%s, %d %s: %v", op, c.status, c.code, err)
			}
		}
	}
}

// S3 has no last bytes of an empty object.
func TestEmptyObjectWithoutATail(t *testing.T) {
	for size, want := range map[string]error{"0": nil, "5": blob.ErrRefused} {
		s := service(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet {
				fail(w, http.StatusRequestedRangeNotSatisfiable, "InvalidRange")
				return
			}
			w.Header().Set("Content-Length", size)
			w.Header().Set("Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT")
		})
		o, err := s.Open(t.Context(), "a")
		if !errors.Is(err, want) || err == nil && o.Size() != 0 {
			t.Errorf("Open of %s bytes: %v", size, err)
		}
		info, err := s.Stat(t.Context(), "a")
		if !errors.Is(err, want) || err == nil && (info.Size != 0 || info.ModTime.Year() != 2006) {
			t.Errorf("Stat of %s bytes = %+v, %v", size, info, err)
		}
	}
}

// What a service sends instead of what it was asked for is no content.
func TestWrongRanges(t *testing.T) {
	for name, header := range map[string]string{
		"none":           "",
		"another start":  "bytes 5-9/1000000",
		"not its length": "bytes 0-1000/1000000",
		"nonsense":       "bytes many",
	} {
		s := service(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT")
			if header == "" {
				w.Write(make([]byte, 300<<10))
				return
			}
			w.Header().Set("Content-Range", header)
			w.WriteHeader(http.StatusPartialContent)
			w.Write(make([]byte, 5))
		})
		if _, err := s.Open(t.Context(), "a"); !errors.Is(err, blob.ErrUnavailable) {
			t.Errorf("%s: Open: %v", name, err)
		}
	}
}

// The completion of an upload may fail after it was answered with 200.
func TestCompletionThatFailsLate(t *testing.T) {
	for code, want := range map[string]error{"InternalError": blob.ErrUnavailable, "PreconditionFailed": blob.ErrExist} {
		aborted := false
		s := service(t, func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			query := r.URL.Query()
			switch {
			case query.Has("uploads"):
				fmt.Fprint(w, "<InitiateMultipartUploadResult><UploadId>id</UploadId></InitiateMultipartUploadResult>")
			case r.Method == http.MethodPost:
				fail(w, http.StatusOK, code)
			case r.Method == http.MethodDelete:
				aborted = true
				w.WriteHeader(http.StatusNoContent)
			default:
				w.Header().Set("ETag", `"part"`)
			}
		})
		_, err := s.Put(t.Context(), "a", writes(make([]byte, 9<<20)))
		if !errors.Is(err, want) || !aborted {
			t.Errorf("%s: Put: %v; aborted %t", code, err, aborted)
		}
	}
}

func TestCertificateThatIsNotTrusted(t *testing.T) {
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // the client ends the handshake
	server.StartTLS()
	t.Cleanup(server.Close)
	s := open(t, s3.Config{Bucket: "bucket", Endpoint: server.URL, PathStyle: true, AccessKey: "id", SecretKey: "secret"})
	if _, err := s.Stat(t.Context(), "a"); !errors.Is(err, blob.ErrRefused) || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("Stat: %v", err)
	}
}

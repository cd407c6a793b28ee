package s3_test

import (
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/blob/blobtest"
	"github.com/hibernacle/hibernacle/internal/blob/s3"
	"github.com/hibernacle/hibernacle/internal/blob/s3/s3test"
)

func open(t *testing.T, cfg s3.Config) *s3.Store {
	t.Helper()
	s, err := s3.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// config returns a config of an empty store on a server, in a bucket of its own
// and below a prefix.
func config(t *testing.T, server *s3test.Server, bucket, prefix string) s3.Config {
	t.Helper()
	cfg, err := server.Config(t.Context(), strings.ToLower(bucket), prefix)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func TestConformance(t *testing.T) {
	server := s3test.Start(t)
	for _, prefix := range []string{"", "below/a-prefix"} {
		t.Run(prefix, func(t *testing.T) {
			blobtest.Suite{Unheld: true, Quick: prefix == "", Open: func(t *testing.T, name string) blob.Store {
				return open(t, config(t, server, name+"-"+prefix[:min(1, len(prefix))]+"0", prefix))
			}}.Run(t)
		})
	}
}

package s3

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/minio/minio-go/v7/pkg/s3utils"
)

// Config says where a store is and how to get in. As JSON it holds the secrets:
// it may travel through a pipe, not on a command line. Printed and logged it
// does not show them.
type Config struct {
	Bucket string `json:"bucket"`
	Prefix string `json:"prefix,omitempty"` // before all keys, without a slash at its ends

	// Endpoint is the service's URL, of http or https, without a path. Without
	// one it is that of AWS in Region.
	Endpoint  string `json:"endpoint,omitempty"`
	Region    string `json:"region"`
	PathStyle bool   `json:"path_style,omitempty"` // the bucket is in the URL's path, not in its host name

	// Timeout bounds a request: it may take so long, and a second more for each
	// 256 KiB that it moves. 0 stands for DefaultTimeout.
	Timeout time.Duration `json:"timeout_ns,omitempty"`

	AccessKey    string `json:"access_key"`
	SecretKey    string `json:"secret_key"`
	SessionToken string `json:"session_token,omitempty"` // of temporary credentials
}

// Defaults of a Config.
const (
	DefaultRegion  = "us-east-1"
	DefaultTimeout = 15 * time.Second
)

// maxPrefix leaves room for the longest key: S3 allows 1,024 bytes.
const maxPrefix = 512

// ParseURL reads a store's address:
//
//	s3://BUCKET[/PREFIX][?endpoint=https://HOST[:PORT]&region=R&path-style=true|false&timeout=15s]
//
// Without an endpoint it is AWS; with one, path-style is true unless the URL
// says otherwise. A region that it does not name is AWS_REGION, else
// AWS_DEFAULT_REGION, else DefaultRegion. The credentials are those of the
// environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for temporary
// ones, AWS_SESSION_TOKEN; they may be missing.
func ParseURL(address string) (Config, error) {
	c, err := parseURL(address)
	if err == nil {
		err = c.check()
	}
	if err != nil {
		return Config{}, fmt.Errorf("address of an S3 store: %w; it looks like s3://BUCKET/PREFIX?endpoint=https://HOST:PORT&region=REGION", err)
	}
	c.AccessKey = os.Getenv("AWS_ACCESS_KEY_ID")
	c.SecretKey = os.Getenv("AWS_SECRET_ACCESS_KEY")
	c.SessionToken = os.Getenv("AWS_SESSION_TOKEN")
	return c, nil
}

func parseURL(address string) (Config, error) {
	u, err := url.Parse(address)
	if err != nil {
		var uerr *url.Error // repeats the address, which may hold a secret by mistake
		if errors.As(err, &uerr) {
			err = uerr.Err
		}
		return Config{}, err
	}
	switch {
	case u.Scheme != "s3":
		return Config{}, errors.New("it does not begin with s3://")
	case u.User != nil:
		return Config{}, errors.New("credentials do not belong into it: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
	case u.Opaque != "" || u.Fragment != "":
		return Config{}, errors.New("only a bucket, a prefix and parameters belong into it")
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return Config{}, errors.New("its parameters can't be read")
	}
	for name, values := range query {
		if !slices.Contains([]string{"endpoint", "region", "path-style", "timeout"}, name) {
			return Config{}, fmt.Errorf("unknown parameter %q: there are endpoint, region, path-style and timeout", name)
		}
		if len(values) > 1 {
			return Config{}, fmt.Errorf("parameter %q is there more than once", name)
		}
	}
	c := Config{
		Bucket:   u.Host,
		Prefix:   strings.Trim(u.Path, "/"),
		Endpoint: strings.TrimSuffix(query.Get("endpoint"), "/"),
		Region:   cmp.Or(query.Get("region"), os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION"), DefaultRegion),
	}
	c.PathStyle = c.Endpoint != ""
	if s := query.Get("path-style"); s != "" {
		if c.PathStyle, err = strconv.ParseBool(s); err != nil {
			return Config{}, fmt.Errorf("path-style is %q, neither true nor false", s)
		}
	}
	if s := query.Get("timeout"); s != "" {
		if c.Timeout, err = time.ParseDuration(s); err != nil || c.Timeout <= 0 {
			return Config{}, fmt.Errorf("timeout is %q, not a time like 15s", s)
		}
	}
	return c, nil
}

// check returns what is wrong with c, apart from its credentials.
func (c Config) check() error {
	if err := s3utils.CheckValidBucketName(c.Bucket); err != nil {
		return fmt.Errorf("bucket %q: %w", c.Bucket, err)
	}
	if c.Prefix != "" {
		for name := range strings.SplitSeq(c.Prefix, "/") {
			if name == "" || name == "." || name == ".." {
				return fmt.Errorf("the names in prefix %q may be neither empty nor dots alone", c.Prefix)
			}
		}
		if len(c.Prefix) > maxPrefix || strings.ToValidUTF8(c.Prefix, "") != c.Prefix || strings.ContainsFunc(c.Prefix, unicode.IsControl) {
			return fmt.Errorf("the prefix is longer than %d bytes or has control characters", maxPrefix)
		}
	}
	if c.Region == "" {
		return errors.New("no region")
	}
	if c.Timeout < 0 {
		return errors.New("negative timeout")
	}
	_, _, err := c.endpoint()
	return err
}

// endpoint returns the service's host with its port if it has one, and whether
// it speaks TLS.
func (c Config) endpoint() (host string, secure bool, err error) {
	if c.Endpoint == "" {
		return "s3." + c.Region + ".amazonaws.com", true, nil
	}
	u, err := url.Parse(c.Endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || *u != (url.URL{Scheme: u.Scheme, Host: u.Host}) {
		return "", false, errors.New("its endpoint is not of the form https://HOST or https://HOST:PORT")
	}
	return u.Host, u.Scheme == "https", nil
}

// String returns the address for ParseURL, without the credentials.
func (c Config) String() string {
	query := url.Values{"region": {c.Region}}
	if c.Endpoint != "" {
		query.Set("endpoint", c.Endpoint)
	}
	if c.PathStyle != (c.Endpoint != "") {
		query.Set("path-style", strconv.FormatBool(c.PathStyle))
	}
	if c.Timeout != 0 {
		query.Set("timeout", c.Timeout.String())
	}
	u := url.URL{Scheme: "s3", Host: c.Bucket, Path: c.Prefix}
	// Colons and slashes stay readable in a query.
	u.RawQuery = strings.NewReplacer("%3A", ":", "%2F", "/").Replace(query.Encode())
	return u.String()
}

// GoString is String: %#v shows no secrets either.
func (c Config) GoString() string { return c.String() }

// LogValue implements slog.LogValuer with String.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }

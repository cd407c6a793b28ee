package client

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/hibernacle/hibernacle/api"
)

// Agent returns what a connect client (api/process/processconnect,
// api/filesystem/filesystemconnect) needs to speak to the agent in a sandbox:
//
//	hc, base := c.Agent(id, "")
//	procs := processconnect.NewProcessClient(hc, base)
//
// user is the user in the guest, "" the default one. Every call wakes the
// sandbox.
func (c *Client) Agent(id, user string) (hc *http.Client, baseURL string) {
	rt := agentTransport{c, user}
	return &http.Client{Transport: rt}, c.endpoint("sandboxes", id, "agent").String()
}

// agentTransport sends requests with the key and the guest's user.
type agentTransport struct {
	c    *Client
	user string
}

func (t agentTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("X-API-Key", t.c.key)
	if t.user != "" {
		r.SetBasicAuth(t.user, "")
	}
	resp, err := t.c.http.Transport.RoundTrip(r)
	if err != nil {
		return nil, t.c.unreachable(r.Context(), err)
	}
	if resp.StatusCode/100 != 2 && resp.Header.Get(api.GuestHeader) == "" { // the daemon's own
		defer resp.Body.Close()
		return nil, readError(resp)
	}
	return resp, nil
}

// Port returns what speaks HTTP to the server at a TCP port in a sandbox:
//
//	hc, base := c.Port(id, 8000)
//	resp, err := hc.Get(base + "/index.html")
//
// Every request wakes the sandbox and comes by way of the daemon's own URL, so
// it needs no name of DNS. Answers are the server's, but for those with which
// the daemon says that there is none.
func (c *Client) Port(id string, port int) (hc *http.Client, baseURL string) {
	u := c.base.JoinPath("sandboxes", url.PathEscape(id), "ports", strconv.Itoa(port))
	return &http.Client{Transport: portTransport{c}}, u.String()
}

// portTransport sends requests with the key.
type portTransport struct{ c *Client }

func (t portTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("X-API-Key", t.c.key)
	resp, err := t.c.http.Transport.RoundTrip(r)
	if err != nil {
		return nil, t.c.unreachable(r.Context(), err)
	}
	return resp, nil
}

// DialPort connects to a TCP port in a sandbox and wakes it for that. The
// connection has a CloseWrite method that ends the sending direction alone.
func (c *Client) DialPort(ctx context.Context, id string, port int) (net.Conn, error) {
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	// While the request is under way the end of ctx breaks it off.
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	up, err := c.upgrade(conn, id, port)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		if _, refused := err.(*Error); refused {
			return nil, err
		}
		return nil, c.unreachable(ctx, err)
	}
	return up, nil
}

// upgrade asks the daemon to make of conn a stream to a port.
func (c *Client) upgrade(conn net.Conn, id string, port int) (net.Conn, error) {
	u := c.endpoint("sandboxes", id, "ports", strconv.Itoa(port), "connect")
	req, err := http.NewRequest(http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("X-API-Key", c.key)
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "tcp")
	if err := req.Write(conn); err != nil {
		return nil, err
	}
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer resp.Body.Close()
		return nil, readError(resp)
	}
	return streamConn{conn, br}, nil
}

// dial connects to the daemon.
func (c *Client) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	switch c.base.Scheme {
	case "https":
		td := tls.Dialer{NetDialer: &d, Config: &tls.Config{ServerName: c.base.Hostname(), NextProtos: []string{"http/1.1"}}}
		return td.DialContext(ctx, "tcp", hostPort(c.base.Host, "443"))
	default:
		return d.DialContext(ctx, "tcp", hostPort(c.base.Host, "80"))
	}
}

func hostPort(host, port string) string {
	if _, _, err := net.SplitHostPort(host); err == nil {
		return host
	}
	return net.JoinHostPort(host, port)
}

// streamConn is a connection of which some bytes may have been read ahead.
type streamConn struct {
	net.Conn
	r *bufio.Reader
}

func (s streamConn) Read(p []byte) (int, error) { return s.r.Read(p) }

// CloseWrite ends the sending direction.
func (s streamConn) CloseWrite() error {
	if c, ok := s.Conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return fmt.Errorf("%T can't be closed by half", s.Conn)
}

package cli

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/hibernacle/hibernacle/client"
)

func newPortForwardCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "port-forward ID LOCAL:PORT...",
		Short: "Make TCP ports of a sandbox reachable on this host",
		Long: `Listen at 127.0.0.1:LOCAL and connect what comes in to PORT in the sandbox, until
interrupted. LOCAL 0 takes a free port; PORT alone uses the same number here. A
connection wakes the sandbox.`,
		Args: minArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runPortForward(cmd.Context(), a, args[0], args[1:])
		},
	}
}

func runPortForward(ctx context.Context, a *app, id string, specs []string) error {
	var forwards []forward
	for _, spec := range specs {
		f, err := parseForward(spec)
		if err != nil {
			return err
		}
		forwards = append(forwards, f)
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	defer c.Close()
	sb, err := c.Get(ctx, id)
	if err != nil {
		return err
	}
	var serving sync.WaitGroup
	defer serving.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, f := range forwards {
		ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(f.local)))
		if err != nil {
			return hintError{err, "LOCAL 0 takes a free port"}
		}
		context.AfterFunc(ctx, func() { ln.Close() })
		fmt.Fprintf(a.Out, "%s -> %s:%d\n", ln.Addr(), sb.ID, f.port)
		f.client, f.id = c, sb.ID
		f.complain = func(err error) { fmt.Fprintln(a.Err, "hib: "+describe(err)) }
		serving.Go(func() { f.serve(ctx, ln) })
	}
	<-ctx.Done()
	return nil
}

// parseForward reads "LOCAL:PORT" or "PORT".
func parseForward(spec string) (forward, error) {
	l, p, ok := strings.Cut(spec, ":")
	if !ok {
		p = l
	}
	local, err1 := strconv.ParseUint(l, 10, 16)
	port, err2 := strconv.ParseUint(p, 10, 16)
	if err1 != nil || err2 != nil || port == 0 {
		return forward{}, usagef("%q: it must be of the form LOCAL:PORT, for example 8080:80", spec)
	}
	return forward{local: int(local), port: int(port)}, nil
}

// forward connects what a listener accepts to one port of a sandbox.
type forward struct {
	local    int // port here, 0 for a free one
	port     int // there
	client   *client.Client
	id       string
	complain func(error)
}

// serve accepts until the listener is closed and waits for its connections.
func (f forward) serve(ctx context.Context, ln net.Listener) {
	var conns sync.WaitGroup
	defer conns.Wait()
	for {
		local, err := ln.Accept()
		if err != nil {
			return
		}
		conns.Go(func() { f.connect(ctx, local) })
	}
}

func (f forward) connect(ctx context.Context, local net.Conn) {
	defer local.Close()
	remote, err := f.client.DialPort(ctx, f.id, f.port)
	if err != nil {
		if ctx.Err() == nil {
			f.complain(err)
		}
		return
	}
	defer remote.Close()
	defer context.AfterFunc(ctx, func() { local.Close(); remote.Close() })()
	var both sync.WaitGroup
	both.Go(func() { copyHalf(remote, local) })
	both.Go(func() { copyHalf(local, remote) })
	both.Wait()
}

// copyHalf copies one direction and passes its end on; a broken one breaks both.
func copyHalf(dst, src net.Conn) {
	_, err := io.Copy(dst, src)
	if h, ok := dst.(interface{ CloseWrite() error }); ok && err == nil {
		err = h.CloseWrite()
	}
	if err != nil {
		dst.Close()
		src.Close()
	}
}

// Package peer restores a template's guest the way QEMU offers it by itself: the
// machine is saved with "migrate" to a file and started anew with "-incoming"
// from it. It boots the same image with the same processor, devices and agent as
// a sandbox, so that a benchmark can hold one against the other.
//
// It is fair to QEMU: the read-only base image is not copied into the file, huge
// pages are allowed, the file is in the page cache, the network stands ready
// before the clock starts, and nothing is done in the guest (clock, randomness,
// connections) before its first request is let through.
package peer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/hibernacle/hibernacle/api/process"
	"github.com/hibernacle/hibernacle/api/process/processconnect"
	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/template"
	"github.com/hibernacle/hibernacle/internal/vmm"
	"github.com/hibernacle/hibernacle/internal/vmm/qemu"
	"github.com/hibernacle/hibernacle/internal/vnet"
)

// Config says what is saved and restored.
type Config struct {
	Template string    // folder of a template that was built
	Accel    string    // as qemu.Config has it
	Shape    vmm.Shape // of the machine
	Server   []string  // command that starts an HTTP server in the guest, and ends then
	Port     uint16    // that it listens at
}

// Peer is a guest with its server, saved in a file.
type Peer struct {
	config Config
	driver *qemu.Driver
	art    template.Artifacts
	dir    string // private, removed by Close
}

// patience bounds the boot of the guest and each start of its server.
const patience = 5 * time.Minute

// New boots the guest, starts its server and saves both. It takes as long as a
// cold boot, and as much room in the folder for temporary files as the guest
// uses memory. The caller closes the Peer.
func New(ctx context.Context, config Config) (*Peer, error) {
	art, err := template.Load(config.Template)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "hib-peer-")
	if err != nil {
		return nil, err
	}
	p := &Peer{config: config, driver: qemu.New(qemu.Config{Accel: config.Accel}), art: art, dir: dir}
	if err := p.save(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("prepare the guest that QEMU saves: %w", err), p.Close())
	}
	return p, nil
}

// Close removes what was saved.
func (p *Peer) Close() error { return os.RemoveAll(p.dir) }

func (p *Peer) file() string { return filepath.Join(p.dir, "saved") }

// Bytes returns the size of the file that the guest is saved in.
func (p *Peer) Bytes() (int64, error) {
	info, err := os.Stat(p.file())
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// save boots the guest, starts the server and saves both.
func (p *Peer) save(ctx context.Context) error {
	g, err := p.start(ctx, &vmm.Boot{Kernel: p.art.Kernel, Initrd: p.art.Initrd, Cmdline: p.art.Cmdline})
	if err != nil {
		return err
	}
	defer g.close()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := g.machine.Run(ctx); err != nil {
		return err
	}
	if err := g.serve(ctx, p.config.Server); err != nil {
		return err
	}
	if err := g.awaitAnswer(ctx, p.config.Port); err != nil {
		return err
	}
	f, err := os.Create(p.file())
	if err != nil {
		return err
	}
	return errors.Join(g.machine.SaveAll(ctx, f), f.Close())
}

// Restore starts a new QEMU from the file and returns how long it took from
// there to the answer of the server to a GET of path.
func (p *Peer) Restore(ctx context.Context, path string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	f, err := os.Open(p.file())
	if err != nil {
		return 0, err
	}
	defer f.Close()
	begun := time.Now()
	g, err := p.start(ctx, nil)
	if err != nil {
		return 0, err
	}
	defer g.close()
	if err := g.machine.RestoreAll(ctx, f); err != nil {
		return 0, err
	}
	if err := g.machine.Run(ctx); err != nil {
		return 0, err
	}
	err = g.ask(ctx, p.config.Port, path)
	return time.Since(begun), err
}

// guest is one machine with its network.
type guest struct {
	machine *qemu.Plain
	net     *vnet.Network
	dir     string
}

// start starts a machine with a network and stopped vCPUs.
func (p *Peer) start(ctx context.Context, boot *vmm.Boot) (*guest, error) {
	dir, err := os.MkdirTemp(p.dir, "vm-")
	if err != nil {
		return nil, err
	}
	network, err := vnet.New(vnet.Config{})
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(dir, "net")
	if err := network.Listen(socket); err != nil {
		return nil, errors.Join(err, network.Close())
	}
	machine, err := p.driver.StartPlain(ctx, vmm.Spec{
		Shape: p.config.Shape, Dir: dir, BaseImage: p.art.BaseImage, NetSocket: socket, MAC: vnet.GuestMAC, Boot: boot,
	})
	if err != nil {
		return nil, errors.Join(err, network.Close())
	}
	return &guest{machine, network, dir}, nil
}

func (g *guest) close() {
	_ = g.machine.Close()
	_ = g.net.Close()
	_ = os.RemoveAll(g.dir)
}

// serve makes the agent of a guest that boots ready and has it start a command.
func (g *guest) serve(ctx context.Context, command []string) error {
	dial := func(ctx context.Context) (net.Conn, error) { return g.net.DialControl(ctx, guestapi.Port) }
	agent := guestapi.NewClient(dial)
	defer agent.Close()
	if err := agent.Health(ctx); err != nil {
		return err
	}
	_, err := agent.Init(ctx, "", guestapi.InitRequest{
		Reason: guestapi.ReasonBoot, UnixNano: time.Now().UnixNano(), Entropy: make([]byte, 64), Generation: 1,
		Identity: &guestapi.Identity{ID: "peer", Hostname: "peer", MachineID: strings.Repeat("1", 32), ControlToken: "peer"},
	})
	if err != nil {
		return err
	}
	procs := processconnect.NewProcessClient(guestapi.HTTPClient(dial), guestapi.BaseURL)
	events, err := procs.Start(ctx, connect.NewRequest(&process.StartRequest{
		Process: &process.ProcessConfig{Cmd: command[0], Args: command[1:]},
	}))
	if err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	defer events.Close()
	for events.Receive() {
		if end := events.Msg().GetEvent().GetEnd(); end != nil {
			if end.GetExitCode() != 0 {
				return fmt.Errorf("start the server: %s", end.GetStatus())
			}
			return nil
		}
	}
	return fmt.Errorf("start the server: the agent broke off: %w", events.Err())
}

// awaitAnswer waits until the server serves.
func (g *guest) awaitAnswer(ctx context.Context, port uint16) error {
	for {
		err := g.ask(ctx, port, "/")
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the server does not answer: %w", err)
		case <-g.machine.Exited():
			return fmt.Errorf("the machine ended: %s", g.machine.Exit().Detail)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// ask sends GET path and reads the answer to its end.
func (g *guest) ask(ctx context.Context, port uint16, path string) error {
	conn, err := g.net.Dial(ctx, port)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: sandbox\r\nConnection: close\r\n\r\n", path); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the server answered %s", resp.Status)
	}
	_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20))
	return err
}

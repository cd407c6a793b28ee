package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/blob/disk"
	"github.com/hibernacle/hibernacle/internal/catalog"
	"github.com/hibernacle/hibernacle/internal/pager"
	"github.com/hibernacle/hibernacle/internal/sandbox"
	"github.com/hibernacle/hibernacle/internal/shim"
	"github.com/hibernacle/hibernacle/internal/snapshot"
	"github.com/hibernacle/hibernacle/internal/template"
	"github.com/hibernacle/hibernacle/internal/tier"
	"github.com/hibernacle/hibernacle/internal/vnet"
)

// apiVersion is the version of the REST interface.
const apiVersion = 1

// guestProgram is the agent's file; it lies beside this program.
const guestProgram = "hib-guest"

// wired is the core with the catalog that it works on.
type wired struct {
	*sandbox.Core
	tier      *tier.Tier // nil: there is no remote store
	catalog   *catalog.Catalog
	observers *observers
}

// observed returns who is told of what happens.
func (w wired) observed() *observers { return w.observers }

// Close ends the core and then what it works on; the guests go on.
func (w wired) Close() error {
	w.observers.unwatch()
	w.Core.Close()
	w.observers.close()
	if w.tier != nil {
		w.tier.Close()
	}
	return w.catalog.Close()
}

// wire builds the core of the parts that this host has.
func wire(ctx context.Context, c Config, f Folders, a Account) (core, api.Version, error) {
	driverConfig := shim.DriverConfig{Accel: c.Accel, CPUModel: c.CPUModel, WrapCommand: c.WrapVMM}
	driver := shim.NewDriver(driverConfig)
	info, err := driver.Info(ctx)
	if err != nil {
		return nil, api.Version{}, fmt.Errorf("%w; hib doctor checks this host", err)
	}
	guests, parked, pressure, err := memoryLimits(c)
	if err != nil {
		return nil, api.Version{}, err
	}
	store, err := disk.Open(f.Store)
	if err != nil {
		return nil, api.Version{}, err
	}
	if err := f.giveStore(a); err != nil {
		return nil, api.Version{}, err
	}
	if account := credential(a); account != nil {
		store.GiveTo(account.UID, account.GID)
	}
	if err := store.Clean(ctx); err != nil {
		return nil, api.Version{}, fmt.Errorf("clean the store: %w", err)
	}
	probe := pager.ProbeDirty()
	if probe != nil {
		c.Log.Warn("every hibernation saves the whole memory", "error", probe)
	}
	cat, err := catalog.Open(f.Catalog)
	if err != nil {
		return nil, api.Version{}, err
	}
	seen, err := openObservers(ctx, c, f, cat)
	if err != nil {
		return nil, api.Version{}, errors.Join(err, cat.Close())
	}
	remote, read, err := openTier(ctx, c, f, store)
	if err != nil {
		seen.close()
		return nil, api.Version{}, errors.Join(err, cat.Close())
	}
	snapshots := snapshot.NewRepository(store)
	var replicas sandbox.Tier // stays nil without a remote store
	if remote != nil {
		snapshots, replicas = snapshot.NewRepository(remote.Store()), remote
	}
	core, err := sandbox.New(ctx, sandbox.Config{
		Catalog: cat,
		Launcher: launcher{&shim.Launcher{
			Binary: c.Program, RunDir: f.Run, Store: f.Store, Account: credential(a),
			Driver: driverConfig, FullCapture: probe != nil, Resolvers: c.Resolvers, Remote: read,
		}},
		Snapshots:    sandbox.FromRepository(snapshots, store),
		Tier:         replicas,
		Keys:         driver,
		Builder:      &sandbox.TemplateBuilder{},
		TemplatesDir: f.Templates,
		StoreDir:     f.Store,
		Build:        template.Options{CacheDir: f.Cache, GuestBinary: filepath.Join(filepath.Dir(c.Program), guestProgram)},
		Console:      func(name string) string { return filepath.Join(f.Logs, name+".log") },
		HookLog:      func(id string) string { return filepath.Join(f.Logs, id+".hooks") },
		FreeBytes:    func() (int64, error) { return freeBytes(f.Store) },
		GuestMemory:  guests, HibernateShare: c.DiskReserve,
		Pool: c.Pool, ParkedMemory: parked, Pressure: pressure.watch, LowMemory: pressure.isLow,
		CheckEgress: func(e sandbox.Egress) error {
			_, err := vnet.ParsePolicy(e.Profile, e.Allow, e.Deny)
			return err
		},
		Events: seen.sink(c.Log),
		Log:    c.Log,
	})
	if err != nil {
		if remote != nil {
			remote.Close()
		}
		seen.close()
		return nil, api.Version{}, errors.Join(err, cat.Close())
	}
	seen.watch(core)
	version := api.Version{Version: c.Version, API: apiVersion, VMM: info.Driver + " " + info.Version, Accel: info.Accelerator}
	return wired{core, remote, cat, seen}, version, nil
}

// credential returns what shims change to, nil if they stay what they are.
func credential(a Account) *shim.Credential {
	if a.UID == os.Geteuid() {
		return nil
	}
	return &shim.Credential{UID: a.UID, GID: a.GID, Groups: a.Groups}
}

// freeBytes returns what an ordinary user could still write where dir is.
func freeBytes(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("look at the free space of %s: %w", dir, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// launcher makes a shim.Launcher what the core takes it for.
type launcher struct{ shims *shim.Launcher }

func (l launcher) Launch(ctx context.Context, spec sandbox.LaunchSpec) (sandbox.VM, error) {
	c, err := l.shims.Launch(ctx, spec.VM)
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (l launcher) Adopt(ctx context.Context, h shim.Handle) (sandbox.VM, error) {
	c, err := l.shims.Adopt(ctx, h)
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (l launcher) Kill(ctx context.Context, h shim.Handle) error { return l.shims.Discard(ctx, h) }

func (l launcher) Orphans(ctx context.Context, known []string) error {
	return l.shims.Reap(ctx, known)
}

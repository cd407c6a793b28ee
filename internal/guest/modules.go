package guest

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	modulesList = "/hib/modules.list" // one path below modulesDir a line, in the order of loading
	modulesDir  = "/hib/modules"
)

// moduleParameters are what modules are loaded with.
var moduleParameters = map[string]string{
	// Polled transmission waits for a device that was shut down for ever, with the
	// processor: a guest that powered off while a packet was on its way hung.
	"virtio_net.ko": "napi_tx=0",
}

// loadModules loads the kernel modules that a list names. One that cannot be
// loaded warns: it shows later if it is needed.
func loadModules(list, dir string, log *slog.Logger) {
	f, err := os.Open(list)
	if err != nil {
		log.Warn("no kernel modules are loaded", "err", err)
		return
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		name := strings.TrimSpace(lines.Text())
		if name == "" || strings.HasPrefix(name, "#") {
			continue
		}
		warn(log, "load a kernel module", loadModule(filepath.Join(dir, name)))
	}
	warn(log, "read the list of kernel modules", lines.Err())
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	err = unix.FinitModule(int(f.Fd()), moduleParameters[filepath.Base(path)], 0)
	switch {
	case errors.Is(err, unix.EEXIST): // it is loaded
	case errors.Is(err, unix.ENODEV): // there is no such hardware
	case err != nil:
		return fmt.Errorf("load %s: %w", path, err)
	}
	return nil
}

// hib-guest is the agent in a sandbox: the first process of its microVM.
package main

import (
	"log/slog"
	"os"

	"github.com/hibernacle/hibernacle/internal/guest"
)

func main() {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := guest.Main(log); err != nil {
		log.Error("hib-guest ends", "err", err)
		os.Exit(1)
	}
}

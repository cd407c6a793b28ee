// Command demo plays the story of a sandbox on a private daemon: it clones a
// repository, installs something, serves HTTP out of 200 MB of state, sleeps,
// outlives the daemon's death twice, and wakes where it stopped. Every figure
// that it prints is measured on the spot, and it exits 0 only if each claim that
// it prints was checked.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	start := time.Now()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "\ndemo: "+err.Error())
		os.Exit(1)
	}
	fmt.Printf("\nEvery claim was checked. The demo took %.0f s.\n", time.Since(start).Seconds())
}

func run(ctx context.Context) (err error) {
	d, err := startDaemon(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if stopErr := d.close(); err == nil {
			err = stopErr
		}
	}()
	if err := d.template(ctx); err != nil {
		return err
	}
	s := &story{d: d}
	defer s.cleanUp()
	return s.play(ctx)
}

// step announces what comes.
func step(format string, args ...any) { fmt.Printf("\n▸ "+format+"\n", args...) }

// figure prints something measured.
func figure(format string, args ...any) { fmt.Printf("    "+format+"\n", args...) }

// claim prints what was checked, and is an error if it does not hold.
func claim(holds bool, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	if !holds {
		return fmt.Errorf("this does not hold: %s", what)
	}
	fmt.Println("  ✓ " + what)
	return nil
}

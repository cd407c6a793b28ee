// Command s3server runs an S3 server on a folder until it is interrupted, and
// prints how to reach it as exports for a shell.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/hibernacle/hibernacle/internal/blob/s3/s3test"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "s3server:", err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 2 {
		return fmt.Errorf("usage: s3server DIR")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	server, err := s3test.Serve(ctx, os.Args[1])
	if err != nil {
		return err
	}
	defer server.Stop()
	cfg, err := server.Config(ctx, "hibernacle", "")
	if err != nil {
		return err
	}
	fmt.Printf("export HIB_STORE=%q\nexport AWS_ACCESS_KEY_ID=%s\nexport AWS_SECRET_ACCESS_KEY=%s\n", cfg, cfg.AccessKey, cfg.SecretKey)
	select {
	case <-ctx.Done():
		return nil
	case <-server.Done():
		return fmt.Errorf("the server ended by itself")
	}
}

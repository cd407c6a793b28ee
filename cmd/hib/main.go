// Command hib is Hibernacle's command line and its daemon.
package main

import (
	"os"

	"github.com/hibernacle/hibernacle/internal/cli"
)

// version is set by the linker.
var version = "dev"

func main() { os.Exit(cli.Main(version)) }

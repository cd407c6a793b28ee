package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"

	processpb "github.com/hibernacle/hibernacle/api/process"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

var (
	errNoCommand  = errors.New("command not found")
	errBadCommand = errors.New("invalid command")
)

// command is a program with all that it is executed with.
type command struct {
	path string   // of the program
	argv []string // with the name it was called by first
	env  []string
	dir  string
	user account
}

// resolveCommand makes a command of a request: user's account, the agent's
// default environment, the request's on top.
func resolveCommand(cfg *processpb.ProcessConfig, user account, defaults map[string]string) (command, error) {
	c := command{user: user, argv: append([]string{cfg.GetCmd()}, cfg.GetArgs()...)}
	for _, arg := range c.argv {
		if strings.ContainsRune(arg, 0) {
			return c, fmt.Errorf("%w: argument %q holds a NUL byte", errBadCommand, arg)
		}
	}
	env, err := environment(user, defaults, cfg.GetEnvs())
	if err != nil {
		return c, err
	}
	for k, v := range env {
		c.env = append(c.env, k+"="+v)
	}
	sort.Strings(c.env)
	if c.dir, err = workingDir(cfg, user); err != nil {
		return c, err
	}
	c.path, err = findProgram(cfg.GetCmd(), env["PATH"], c.dir)
	return c, err
}

// environment merges the variables of an account, the defaults of the sandbox
// and those of a request; later ones win.
func environment(user account, defaults, request map[string]string) (map[string]string, error) {
	env := map[string]string{
		"PATH": defaultPath, "HOME": user.Home, "USER": user.Name, "LOGNAME": user.Name, "SHELL": user.Shell,
	}
	for _, layer := range []map[string]string{defaults, request} {
		for k, v := range layer {
			if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
				return nil, fmt.Errorf("%w: environment variable %q", errBadCommand, k)
			}
			env[k] = v
		}
	}
	return env, nil
}

// workingDir returns the folder to start in: what the request says, or the
// home, or / where the home does not exist.
func workingDir(cfg *processpb.ProcessConfig, user account) (string, error) {
	dir, err := user.resolve(cfg.GetCwd())
	if err != nil {
		return "", fmt.Errorf("%w: %w", errBadCommand, err)
	}
	info, err := os.Stat(dir)
	switch {
	case err == nil && info.IsDir():
		return dir, nil
	case cfg.GetCwd() == "":
		return "/", nil
	case err == nil:
		return "", fmt.Errorf("%w: working folder %s is not a folder", errBadCommand, dir)
	}
	return "", fmt.Errorf("%w: working folder %s does not exist", errBadCommand, dir)
}

// findProgram returns the path of a program: a name without a slash is looked
// up in path.
func findProgram(name, path, dir string) (string, error) {
	if name == "" {
		return "", fmt.Errorf("%w: the request names no command", errBadCommand)
	}
	if strings.Contains(name, "/") {
		file := name
		if !filepath.IsAbs(file) {
			file = filepath.Join(dir, file)
		}
		return file, executable(file)
	}
	for _, d := range filepath.SplitList(path) {
		if d == "" {
			d = "."
		}
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		if file := filepath.Join(d, name); executable(file) == nil {
			return file, nil
		}
	}
	return "", fmt.Errorf("%w: %q is in no folder of PATH=%s", errNoCommand, name, path)
}

func executable(file string) error {
	info, err := os.Stat(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %s does not exist", errNoCommand, file)
	case err != nil:
		return fmt.Errorf("%w: %w", errNoCommand, err)
	case !info.Mode().IsRegular():
		return fmt.Errorf("%w: %s is not a file", errBadCommand, file)
	case info.Mode()&0o111 == 0:
		return fmt.Errorf("%w: %s is not executable", errBadCommand, file)
	}
	return nil
}

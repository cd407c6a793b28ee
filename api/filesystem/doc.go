// Package filesystem holds the wire types of the agent's filesystem service; the
// clients and handlers for it are in filesystemconnect. Both are generated.
package filesystem

//go:generate ../generate.sh filesystem

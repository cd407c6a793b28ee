// Package process holds the wire types of the agent's process service; the
// clients and handlers for it are in processconnect. Both are generated.
package process

//go:generate ../generate.sh process

// Package guest is the agent in the guest: the first process of a microVM
// (Boot), and a server over HTTP (Agent) for what happens in it.
//
// An Agent serves processes, the file system and file transfers to users, and
// control calls (package guestapi) to the host. A process belongs to the
// agent, not to the call that started it: its output goes into a bounded
// journal that any number of clients follow, and it is found again by pid or
// tag, also after a hibernation. An account is a user of the guest's
// /etc/passwd; processes run as one and created files belong to one.
//
// What the agent does to the running system as a whole (clock, randomness,
// identity, sockets, the freezer) goes through the interface System, so that
// all else can be tested on any machine.
package guest

// Package archtest holds the architecture: its test fails for an import between
// packages of this module that the table below does not allow, and for a
// package that the table does not list. A change of the table comes with a
// decision record in docs/decisions.
package archtest

// Module is the path of this module.
const Module = "github.com/hibernacle/hibernacle"

// Allowed lists, for each package (path below Module), the packages of this
// module that its code (not its tests) may import. Data flows one way: a package never
// imports one that stands above it in this table's order of layers.
var Allowed = map[string][]string{
	// mains
	"cmd/hib":       {"internal/cli"},
	"cmd/hib-guest": {"internal/guest"},

	// wire formats, seen by everybody outside
	"api":                              {},
	"api/process":                      {},
	"api/process/processconnect":       {"api/process"},
	"api/filesystem":                   {},
	"api/filesystem/filesystemconnect": {"api/filesystem"},
	"client":                           {"api"},

	// people
	"internal/cli":        {"api", "api/filesystem", "api/filesystem/filesystemconnect", "api/process", "api/process/processconnect", "client", "internal/bench", "internal/bench/peer", "internal/daemon", "internal/doctor", "internal/guestapi", "internal/shim", "internal/vmm"},
	"internal/bench":      {"api"},
	"internal/bench/peer": {"api/process", "api/process/processconnect", "internal/guestapi", "internal/template", "internal/vmm", "internal/vmm/qemu", "internal/vnet"},
	"internal/doctor":     {"api", "client", "internal/daemon", "internal/pager", "internal/shim", "internal/vmm"},
	"internal/daemon":     {"api", "internal/atomicfile", "internal/blob/disk", "internal/blob/s3", "internal/blob/wrap", "internal/catalog", "internal/events", "internal/metrics", "internal/pager", "internal/proxy", "internal/sandbox", "internal/server", "internal/shim", "internal/snapshot", "internal/template", "internal/tier", "internal/vmm", "internal/vnet", "internal/webhook"},

	// the service
	"internal/server":   {"api", "api/process", "api/process/processconnect", "internal/events", "internal/guestapi", "internal/sandbox", "internal/webhook"},
	"internal/proxy":    {"api", "internal/guestapi", "internal/sandbox"},
	"internal/sandbox":  {"internal/blob", "internal/catalog", "internal/failpoint", "internal/guestapi", "internal/shim", "internal/snapshot", "internal/template", "internal/tier", "internal/vmm"},
	"internal/webhook":  {"internal/catalog", "internal/events"},
	"internal/metrics":  {"internal/sandbox"},
	"internal/events":   {},
	"internal/catalog":  {},
	"internal/template": {"internal/atomicfile"},

	// one machine
	"internal/shim": {"internal/atomicfile", "internal/blob", "internal/blob/disk", "internal/blob/s3", "internal/blob/wrap", "internal/failpoint", "internal/guestapi",
		"internal/page", "internal/pager", "internal/snapshot", "internal/tier", "internal/vmm", "internal/vmm/qemu", "internal/vnet"},
	"internal/vmm":         {"internal/page"},
	"internal/vmm/qemu":    {"internal/page", "internal/pager", "internal/vmm"},
	"internal/vmm/fake":    {"internal/guestapi", "internal/page", "internal/vmm"},
	"internal/vmm/vmmtest": {"internal/page", "internal/vmm"},
	"internal/vnet":        {},
	"internal/pager":       {"internal/page"},

	// what is stored
	"internal/snapshot":      {"internal/blob", "internal/pack", "internal/page"},
	"internal/tier":          {"internal/atomicfile", "internal/blob", "internal/blob/disk", "internal/failpoint", "internal/pack", "internal/page", "internal/snapshot"},
	"internal/pack":          {"internal/blob", "internal/page"},
	"internal/blob":          {},
	"internal/blob/disk":     {"internal/atomicfile", "internal/blob"},
	"internal/blob/blobtest": {"internal/blob"},
	"internal/blob/s3":       {"internal/blob"},
	"internal/blob/wrap":     {"internal/blob"},

	// in the guest
	"internal/guest":    {"api/filesystem", "api/filesystem/filesystemconnect", "api/process", "api/process/processconnect", "internal/guestapi"},
	"internal/guestapi": {},

	// tools of everybody
	"internal/atomicfile": {},
	"internal/failpoint":  {},
	"internal/page":       {},
	"internal/archtest":   {},

	// tests and the demo
	"internal/blob/s3/faultproxy":      {},
	"internal/blob/s3/s3test":          {"internal/blob/s3"},
	"internal/blob/s3/s3test/s3server": {"internal/blob/s3/s3test"},
	"internal/vnet/vnettest":           {"internal/vnet"},
	"internal/server/servertest":       {"api", "internal/guest", "internal/guestapi", "internal/sandbox", "internal/server"},
	"internal/sandbox/sandboxtest":     {"internal/catalog", "internal/catalog/catalogtest", "internal/guestapi", "internal/sandbox", "internal/shim", "internal/snapshot", "internal/template", "internal/tier", "internal/vmm"},
	"internal/catalog/catalogtest":     {"internal/catalog"},
	"demo":                             {"api", "client", "internal/bench"},
	"test/hibtest":                     {"api", "internal/bench", "internal/blob/s3", "internal/blob/s3/faultproxy", "internal/blob/s3/s3test", "internal/shim"},
	"test/recordfs":                    {},
}

package fake

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/hibernacle/hibernacle/internal/guestapi"
	"github.com/hibernacle/hibernacle/internal/page"
)

// Where things lie in the guest's RAM, in pages.
const (
	recordPage   = 1
	recordPages  = 64
	programPage  = 256
	programPages = ProgramBytes / page.Size
)

// recordMagic starts the guest's record in RAM; a length and JSON follow.
const recordMagic = "hibfake1"

// tick is how often the guest's counter goes up.
const tick = time.Millisecond

// guest is all that a guest knows. It is written to RAM at each pause.
type guest struct {
	Cmdline string `json:"cmdline"`
	Pauses  uint64 `json:"pauses"` // also in the device state: tells that both are of one moment

	// The guest's clocks advance while it runs, and Awake only while it is not
	// frozen. Since is when they were last brought up to date, on the host's clock.
	Clock time.Duration `json:"clock"`
	Awake time.Duration `json:"awake"`
	since time.Time
	Step  uint64 `json:"step"` // of the Program

	Frozen  bool          `json:"frozen"`
	Attempt uint64        `json:"attempt"` // of the freeze
	ThawAt  time.Duration `json:"thaw_at"` // Clock at which it thaws by itself
	Refused uint64        `json:"refused"` // attempts up to this one were thawed

	Init          guestapi.InitRequest `json:"init"` // the last one; without entropy
	Identity      guestapi.Identity    `json:"identity"`
	PreviousToken string               `json:"previous_token"` // that the last Init came with

	KeepAwake []guestapi.KeepAwake `json:"keep_awake,omitempty"` // "processes" that POST /keep-awake started
}

// advance brings the clocks of a running guest up to now.
func (g *guest) advance(now time.Time) {
	passed := max(now.Sub(g.since), 0)
	g.since = now
	g.Clock += passed
	switch {
	case !g.Frozen:
		g.Awake += passed
	case g.Clock >= g.ThawAt: // nobody sealed the snapshot in time
		g.Awake += g.Clock - g.ThawAt
		g.thaw(g.Attempt)
	}
}

func (g *guest) counter() uint64 { return uint64(g.Awake / tick) }

// thaw ends a freeze and refuses its attempt from now on.
func (g *guest) thaw(attempt uint64) {
	g.Frozen = false
	g.Refused = max(g.Refused, attempt)
}

// store writes the guest to RAM.
func (g *guest) store(m *memory) error {
	text, err := json.Marshal(g)
	if err != nil {
		return err
	}
	data := make([]byte, recordPages*page.Size)
	if len(recordMagic)+4+len(text) > len(data) {
		return errors.New("the guest's record is too long for its pages")
	}
	copy(data, recordMagic)
	binary.LittleEndian.PutUint32(data[len(recordMagic):], uint32(len(text)))
	copy(data[len(recordMagic)+4:], text)
	return m.writePages(recordPage, data)
}

// errNoGuest says that the memory holds no guest, as of a snapshot of something else.
var errNoGuest = errors.New("the memory holds no guest")

// loadGuest reads a guest out of RAM.
func loadGuest(m *memory) (*guest, error) {
	data := make([]byte, recordPages*page.Size)
	if _, err := m.ReadAt(data, recordPage*page.Size); err != nil {
		return nil, err
	}
	length := binary.LittleEndian.Uint32(data[len(recordMagic):])
	text := data[len(recordMagic)+4:]
	if string(data[:len(recordMagic)]) != recordMagic || int64(length) > int64(len(text)) {
		return nil, errNoGuest
	}
	g := new(guest)
	if err := json.Unmarshal(text[:length], g); err != nil {
		return nil, fmt.Errorf("%w: %w", errNoGuest, err)
	}
	return g, nil
}

package snapshot

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"time"
)

// idLen is the length of an ID: 128 bits at 5 bits a character.
const idLen = 26

// idDigits are in ascending order, so IDs sort by time.
const idDigits = "0123456789abcdefghjkmnpqrstvwxyz"

// NewID returns a new ID: 48 bits of the time in milliseconds, then 80 random
// ones, so that it is unique without asking anybody and IDs sort by age.
func NewID() ID {
	var b [16]byte
	rand.Read(b[6:]) // never fails
	ms := uint64(time.Now().UnixMilli())
	hi := ms<<16 | uint64(binary.BigEndian.Uint16(b[6:]))
	lo := binary.BigEndian.Uint64(b[8:])
	var id [idLen]byte
	for i := idLen - 1; i >= 0; i-- {
		id[i] = idDigits[lo&31]
		lo = lo>>5 | hi<<59
		hi >>= 5
	}
	return ID(id[:])
}

// ParseID returns s as an ID, or an error if it cannot be one.
func ParseID(s string) (ID, error) {
	if len(s) != idLen {
		return "", fmt.Errorf("invalid snapshot id %.40q: not %d characters long", s, idLen)
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return "", fmt.Errorf("invalid snapshot id %q: characters other than a-z and 0-9", s)
		}
	}
	return ID(s), nil
}

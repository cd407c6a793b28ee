package snapshot

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// stateVersion is the version of state files that this release writes and reads.
const stateVersion = 1

const (
	stateMagic    = "HIBSTAT\n"
	stateHeader   = 24
	stateOverhead = stateHeader + sha256.Size
	maxState      = 64 << 20
)

// encodeState returns the state file that holds state.
func encodeState(state []byte) ([]byte, error) {
	if len(state) > maxState {
		return nil, fmt.Errorf("the machine's state has %d bytes, at most %d can be kept", len(state), maxState)
	}
	b := make([]byte, 0, len(state)+stateOverhead)
	b = append(b, stateMagic...)
	b = binary.LittleEndian.AppendUint32(b, stateVersion)
	b = append(b, 0, 0, 0, 0)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(state)))
	b = append(b, state...)
	sum := sha256.Sum256(b)
	return append(b, sum[:]...), nil
}

// parseState returns the state in the state file b of snapshot id. Errors name
// the object and wrap ErrCorrupt or ErrVersion.
func parseState(id ID, b []byte) ([]byte, error) {
	key := stateKey(id)
	if len(b) < stateOverhead || string(b[:8]) != stateMagic {
		return nil, corrupt(key, "it is cut off, or no state file")
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != stateVersion {
		return nil, unknownVersion(key, v, stateVersion)
	}
	body, sum := b[:len(b)-sha256.Size], b[len(b)-sha256.Size:]
	if got := sha256.Sum256(body); !bytes.Equal(got[:], sum) {
		return nil, corrupt(key, "it does not fit the hash at its end")
	}
	if binary.LittleEndian.Uint32(b[12:]) != 0 || binary.LittleEndian.Uint64(b[16:]) != uint64(len(body)-stateHeader) {
		return nil, corrupt(key, "its header is wrong")
	}
	return body[stateHeader:], nil
}

// checkState returns the state in the state file b of snapshot id, which must be
// the one that want records. Errors are parseState's.
func checkState(id ID, b []byte, want stateRef) ([]byte, error) {
	if got := stateRefOf(b); got != want {
		return nil, corrupt(stateKey(id), "its hash is %s, recorded is %s", got.SHA256, want.SHA256)
	}
	return parseState(id, b)
}

// stateRefOf describes a state file.
func stateRefOf(b []byte) stateRef {
	sum := sha256.Sum256(b)
	return stateRef{Size: int64(len(b)), SHA256: hex.EncodeToString(sum[:])}
}

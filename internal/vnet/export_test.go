package vnet

import "time"

// SetUDPIdle shortens the idle time-out of UDP flows. Call it before the first.
func (n *Network) SetUDPIdle(d time.Duration) { n.udpIdle = d }

// CheckFrame says whether a frame of the guest may enter the stack.
func CheckFrame(frame []byte) bool {
	const ethernet = 14
	if len(frame) < ethernet {
		return false
	}
	return checkEthernet(frame[:ethernet]) && checkPayload(etherType(frame), frame[ethernet:])
}

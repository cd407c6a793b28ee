package vnet

import (
	"net"
	"strings"

	"github.com/miekg/dns"
)

// The resolver is the authority for these zones: questions in them never leave.
const (
	ownZone     = "hib.internal."
	reverseZone = "127.168.192.in-addr.arpa."
	ownTTL      = 60 // seconds
)

// answerOwn answers a question in the resolver's own zones and says whether it
// is one.
func answerOwn(reply *dns.Msg, q dns.Question) bool {
	name := strings.ToLower(q.Name)
	switch {
	case dns.IsSubDomain(ownZone, name):
		answerForward(reply, q, name)
	case dns.IsSubDomain(reverseZone, name):
		answerReverse(reply, q, name)
	default:
		return false
	}
	reply.Authoritative = true
	return true
}

func answerForward(reply *dns.Msg, q dns.Question, name string) {
	var ip string
	switch name {
	case HostName + ".":
		ip = HostIP
	case GatewayName + ".":
		ip = GatewayIP
	case ownZone:
		return // exists, has no address
	default:
		reply.Rcode = dns.RcodeNameError
		return
	}
	if q.Qtype == dns.TypeA {
		reply.Answer = []dns.RR{&dns.A{Hdr: ownHeader(q), A: net.ParseIP(ip)}}
	}
}

func answerReverse(reply *dns.Msg, q dns.Question, name string) {
	var target string
	switch strings.TrimSuffix(name, "."+reverseZone) {
	case "254":
		target = HostName
	case "1":
		target = GatewayName
	case reverseZone:
		return
	default:
		reply.Rcode = dns.RcodeNameError
		return
	}
	if q.Qtype == dns.TypePTR {
		reply.Answer = []dns.RR{&dns.PTR{Hdr: ownHeader(q), Ptr: target + "."}}
	}
}

func ownHeader(q dns.Question) dns.RR_Header {
	return dns.RR_Header{Name: q.Name, Rrtype: q.Qtype, Class: dns.ClassINET, Ttl: ownTTL}
}

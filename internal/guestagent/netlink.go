package guestagent

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// bringUp enables a network card over netlink, optionally with an address and a
// default route.
func bringUp(card string, addr netip.Prefix, gateway netip.Addr) error {
	if err := await(filepath.Join("/sys/class/net", card)); err != nil {
		return err
	}
	ifi, err := net.InterfaceByName(card)
	if err != nil {
		return fmt.Errorf("cannot find network card %s: %w", card, err)
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink socket: %w", err)
	}
	defer unix.Close(fd)
	for _, m := range requests(ifi.Index, addr, gateway) {
		if err := ask(fd, m.b); err != nil {
			return fmt.Errorf("cannot %s of %s: %w", m.what, card, err)
		}
	}
	return nil
}

type request struct {
	what string
	b    []byte
}

// requests returns the netlink messages for bringUp, in order.
func requests(index int, addr netip.Prefix, gateway netip.Addr) (out []request) {
	le := binary.NativeEndian
	link := make([]byte, unix.SizeofIfInfomsg)
	le.PutUint32(link[4:], uint32(index))
	le.PutUint32(link[8:], unix.IFF_UP)
	le.PutUint32(link[12:], unix.IFF_UP)
	out = append(out, request{"set up the link", message(unix.RTM_NEWLINK, 0, link)})
	if addr.IsValid() {
		a := addr.Addr().As4()
		b := make([]byte, unix.SizeofIfAddrmsg)
		b[0], b[1] = unix.AF_INET, byte(addr.Bits())
		le.PutUint32(b[4:], uint32(index))
		b = append(b, attribute(unix.IFA_LOCAL, a[:])...)
		b = append(b, attribute(unix.IFA_ADDRESS, a[:])...)
		out = append(out, request{"set the address", message(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, b)})
	}
	if gateway.IsValid() {
		g := gateway.As4()
		b := make([]byte, unix.SizeofRtMsg)
		b[0], b[4], b[5], b[6], b[7] = unix.AF_INET, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, unix.RT_SCOPE_UNIVERSE, unix.RTN_UNICAST
		b = append(b, attribute(unix.RTA_GATEWAY, g[:])...)
		b = append(b, attribute(unix.RTA_OIF, le.AppendUint32(nil, uint32(index)))...)
		out = append(out, request{"set the default route", message(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, b)})
	}
	return out
}

func message(kind, flags uint16, body []byte) []byte {
	b := make([]byte, unix.SizeofNlMsghdr, unix.SizeofNlMsghdr+len(body))
	binary.NativeEndian.PutUint32(b, uint32(unix.SizeofNlMsghdr+len(body)))
	binary.NativeEndian.PutUint16(b[4:], kind)
	binary.NativeEndian.PutUint16(b[6:], unix.NLM_F_REQUEST|unix.NLM_F_ACK|flags)
	return append(b, body...)
}

func attribute(kind uint16, v []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(unix.SizeofRtAttr+len(v)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, v...)
	return append(b, make([]byte, -len(b)&3)...)
}

// ask sends one request and waits for its acknowledgment.
func ask(fd int, b []byte) error {
	if err := unix.Sendto(fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buf := make([]byte, os.Getpagesize())
	n, _, err := unix.Recvfrom(fd, buf, 0)
	if err != nil {
		return err
	}
	if n < unix.SizeofNlMsghdr+4 || binary.NativeEndian.Uint16(buf[4:]) != unix.NLMSG_ERROR {
		return fmt.Errorf("netlink answer of %d bytes is not an acknowledgement", n)
	}
	if errno := -int32(binary.NativeEndian.Uint32(buf[unix.SizeofNlMsghdr:])); errno != 0 {
		return unix.Errno(errno)
	}
	return nil
}

package cmlsim

import (
	"cmp"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"sync"
	"time"

	"lull/internal/sim/world"
)

// certs caches the requested certificates.
type certs struct {
	mu   sync.Mutex
	made map[string]*tls.Certificate
}

// TLSConfig returns a configuration with which every host has its own certificate. If
// the client sends no server name, the dialed address selects the host.
func (h *CML) TLSConfig() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			ref := hello.ServerName
			if ref == "" && hello.Conn != nil {
				ref = hostname(hello.Conn.LocalAddr().String())
			}
			return h.Certificate(ref)
		},
	}
}

// Certificate returns the certificate of the host with the address, name or instance
// ID ref. If there is no such host, it returns the simulator's own. The key is the
// image's or is derived from the instance's ID, so a pin of the key stays valid after
// restarts. The certificate itself changes with the address.
func (h *CML) Certificate(ref string) (*tls.Certificate, error) {
	id, seed, names, ips := "lull-sim", "", []string{"localhost"}, []net.IP{net.IPv4(127, 0, 0, 1)}
	h.w.Locate(ref, func(i *world.Instance, _ world.Moment) {
		id, names, ips = i.ID, []string{i.ID, "cml-controller"}, nil
		if i.Host != nil {
			seed = i.Host.TLSKey
		}
		if i.Name != "" {
			names = append(names, i.Name)
		}
		for _, a := range []netip.Addr{i.PublicIP, i.PrivateIP} {
			if a.IsValid() {
				ips = append(ips, a.AsSlice())
			}
		}
	})
	key := fmt.Sprint(id, ips)
	h.certs.mu.Lock()
	defer h.certs.mu.Unlock()
	if c := h.certs.made[key]; c != nil {
		return c, nil
	}
	c, err := selfSigned(id, cmp.Or(seed, id), names, ips)
	if err != nil {
		return nil, err
	}
	if h.certs.made == nil || len(h.certs.made) > 20_000 {
		h.certs.made = map[string]*tls.Certificate{}
	}
	h.certs.made[key] = c
	return c, nil
}

func selfSigned(id, keySeed string, names []string, ips []net.IP) (*tls.Certificate, error) {
	seed, serial := sha256.Sum256([]byte("lull simulated host "+keySeed)), sha256.Sum256([]byte(id))
	key := ed25519.NewKeyFromSeed(seed[:])
	from := time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC) // synctest's clock starts in 2000
	t := &x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(serial[:12]), Subject: pkix.Name{CommonName: names[len(names)-1], Organization: []string{"Cisco Modeling Labs"}},
		NotBefore: from, NotAfter: from.AddDate(50, 0, 0), DNSNames: names, IPAddresses: ips, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(nil, t, t, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("cannot make a certificate for host %s: %w", id, err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("cannot make a certificate for host %s: %w", id, err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}

package microvm

import "lull/internal/core/instance"

// Memory that QEMU uses in addition to the guest's, as measured: its code and heap
// and, in software emulation, the cache of translated code, which has a limit.
const (
	overheadKVM = 32 << 20
	overheadTCG = overheadKVM + translated + 32<<20
	translated  = 64 << 20
)

// Size implements instance.Sizer.
func (r *Runtime) Size(s *instance.Spec) (memory int64, slow bool) {
	m, err := (Machine{}).with(s.Image, s.Memory, s.CPUs, s.Net)
	if err != nil { // such an instance cannot start either
		return 0, true
	}
	if a, _ := r.accel(); a == KVM {
		return m.Memory + overheadKVM, true
	}
	return m.Memory + overheadTCG, true
}

package microvm

import "lull/internal/instance"

// What QEMU holds beside a guest's memory (measured, notes of performance): its
// own text and heap, and in software emulation the code that it has translated,
// which it throws away when there is more.
const (
	overheadKVM = 32 << 20
	overheadTCG = overheadKVM + translated + 32<<20
	translated  = 64 << 20
)

// Size implements instance.Sizer.
func (r *Runtime) Size(s *instance.Spec) (memory int64, slow bool) {
	m, err := (Machine{}).with(s.Image, s.Memory, s.CPUs, s.Net)
	if err != nil { // it does not start either
		return 0, true
	}
	if a, _ := r.accel(); a == KVM {
		return m.Memory + overheadKVM, true
	}
	return m.Memory + overheadTCG, true
}

package world

// TypeInfo is the simulator's description of an instance type.
type TypeInfo struct {
	Name        string
	CPUs        int
	MemoryMiB   int
	Hibernation bool
	Metal       bool
	StoreGB     int // total instance store volumes; 0 means EBS only
	GPU         bool
	Arm         bool
}

// Types are the instance types that can be launched.
var Types = []TypeInfo{
	{Name: "c5.large", CPUs: 2, MemoryMiB: 4096, Hibernation: true},
	{Name: "c5.metal", CPUs: 96, MemoryMiB: 196608, Metal: true},
	{Name: "c5d.4xlarge", CPUs: 16, MemoryMiB: 32768, Hibernation: true, StoreGB: 400},
	{Name: "g5.xlarge", CPUs: 4, MemoryMiB: 16384, StoreGB: 250, GPU: true},
	{Name: "m1.small", CPUs: 1, MemoryMiB: 1740, StoreGB: 160},
	{Name: "m5.2xlarge", CPUs: 8, MemoryMiB: 32768, Hibernation: true},
	{Name: "m5.large", CPUs: 2, MemoryMiB: 8192, Hibernation: true},
	{Name: "m5.xlarge", CPUs: 4, MemoryMiB: 16384, Hibernation: true},
	{Name: "m5zn.metal", CPUs: 48, MemoryMiB: 196608, Metal: true},
	{Name: "m7g.large", CPUs: 2, MemoryMiB: 8192, Hibernation: true, Arm: true},
	{Name: "r5.xlarge", CPUs: 4, MemoryMiB: 32768, Hibernation: true},
	{Name: "t3.large", CPUs: 2, MemoryMiB: 8192, Hibernation: true},
	{Name: "t3.medium", CPUs: 2, MemoryMiB: 4096, Hibernation: true},
	{Name: "t3.micro", CPUs: 2, MemoryMiB: 1024, Hibernation: true},
	{Name: "t3.small", CPUs: 2, MemoryMiB: 2048, Hibernation: true},
	{Name: "t3.xlarge", CPUs: 4, MemoryMiB: 16384, Hibernation: true},
}

// LookupType finds an instance type by name.
func LookupType(name string) (TypeInfo, bool) {
	for _, t := range Types {
		if t.Name == name {
			return t, true
		}
	}
	return TypeInfo{}, false
}

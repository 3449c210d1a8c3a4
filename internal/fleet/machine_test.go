package fleet

import (
	"testing"

	"lull/internal/fleet/audit"
	"lull/internal/fleet/settings"
	"lull/internal/store/mem"
)

// TestWorkerOfAMachineWithoutARegion checks that a worker is found by its EC2
// instance alone, for an agent that does not know its region.
func TestWorkerOfAMachineWithoutARegion(t *testing.T) {
	client := mem.New(mem.Options{}).Client()
	t.Cleanup(client.Close)
	f, err := New(Options{Store: client, ID: "fleet-1", File: settings.Layer{Values: map[string]any{"aws_region_configs": map[string]any{"eu-north-1": map[string]any{}}}}})
	if err != nil {
		t.Fatal(err)
	}
	by := audit.Actor{Name: "ada", Kind: audit.KindUser}
	for region, id := range map[string]string{"us-east-1": "i-0123456789abcdef0", "eu-north-1": "i-0123456789abcdef1", "eu-west-1": "i-0123456789abcdef2"} {
		w, err := f.ImportWorker(t.Context(), by, ImportedWorker{AWSRegion: region, EC2InstanceID: id})
		if err != nil {
			t.Fatal(err)
		}
		for _, asked := range []string{region, ""} {
			got, err := f.WorkerOfMachine(t.Context(), id, asked)
			if known := asked != "" || region != "eu-west-1"; (err == nil) != known || known && got.ID != w.ID {
				t.Errorf("%s in %q: %q, %v", id, asked, got.ID, err)
			}
		}
	}
}

package main

import (
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/fleet/worker"
	"lull/internal/server"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// TestDashboardCancelsAPreview checks that the page shows the progress of a
// simulation over a slow journal, and that canceling it also stops the server's
// reading. The journal is the test's own, so the test sees whether the server still
// waits for it.
func TestDashboardCancelsAPreview(t *testing.T) {
	chrome := startBrowser(t)
	db := mem.New(mem.Options{}).Client()
	t.Cleanup(db.Close)
	j, rec := &reader{slow: true, gone: make(chan struct{})}, evidence.Recorder{Beat: 30 * time.Minute}
	p := newPast()
	for _, c := range p.checks {
		j.records = append(j.records, rec.Take(c)...)
	}
	j.records = append(j.records, rec.Flush()...)
	for _, w := range p.workers {
		data, err := store.Codec[worker.Worker]{Version: 1}.Encode("workers/"+w.ID, w)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := db.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put("workers/"+w.ID, data)}}); err != nil {
			t.Fatal(err)
		}
	}
	url, token := site(t, db, func(o *server.Options) { o.Evidence = j })
	w := open(t, chrome, url+"/preview?policy=aggressive")
	w.login(token)
	w.until(`document.querySelector('#one-name').value === 'aggressive'`)
	w.press("Preview")
	w.sees(`Replaying recorded days: [1-9]\d? %`)
	w.picture("preview-running")
	w.press("Cancel")
	select {
	case <-j.gone:
	case <-time.After(patience):
		t.Fatal("the server continues a preview that was cancelled")
	}
	w.until(`![...document.querySelectorAll('[role=progressbar]')].length`)
}

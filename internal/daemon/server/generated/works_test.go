package generated

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"lull/internal/daemon/server"
	"lull/internal/daemon/server/access"
	"lull/internal/fleet"
	"lull/internal/store/mem"
)

// client_test.go was made from docs/reference/server-openapi.json on 2026-11-21
// by oapi-codegen v2.8.2 (models and client of these operations). It stays as
// it is: a client that was made then has to work now.

// TestGeneratedClientWorks drives a server by a client that a program made
// from the OpenAPI document, through a worker's commands and questions: every
// answer is one that the document describes.
func TestGeneratedClientWorks(t *testing.T) {
	c := serve(t)
	ctx := t.Context()
	key := "once"
	template, err := c.PutTemplateWithResponse(ctx, "small", &PutTemplateParams{}, TemplateBody{InstanceType: "m5.large", AmiNameFilter: "cml*"})
	if err != nil || template.JSON200 == nil {
		t.Fatalf("put a template: %v %s", err, template.Body)
	}
	templates, err := c.ListTemplatesWithResponse(ctx, &ListTemplatesParams{})
	if err != nil || templates.JSON200 == nil || len(*templates.JSON200.Items) != 1 {
		t.Fatalf("list the templates: %v %s", err, templates.Body)
	}
	region, owner := "us-east-1", "ada"
	var ids []string
	for range 2 { // the second is the same call again
		made, err := c.CreateWorkerWithResponse(ctx, &CreateWorkerParams{IdempotencyKey: &key},
			NewWorker{Name: "one", AwsRegion: &region, TemplateName: "small", Owner: &owner, Tags: &map[string]string{"team": "net"}})
		if err != nil || made.JSON202 == nil {
			t.Fatalf("create a worker: %v %s", err, made.Body)
		}
		ids = append(ids, made.JSON202.Id)
	}
	if ids[0] != ids[1] {
		t.Errorf("one key made %s and %s", ids[0], ids[1])
	}
	id, text, tags := ids[0], "ADA", []string{"team=net"}
	states := []ListWorkersParamsStatus{"PENDING", "FAILED"}
	list, err := c.ListWorkersWithResponse(ctx, &ListWorkersParams{Q: &text, Tag: &tags, Status: &states})
	if err != nil || list.JSON200 == nil || *list.JSON200.Total != 1 || (*list.JSON200.Items)[0].Id != id {
		t.Fatalf("list the workers: %v %s", err, list.Body)
	}
	minutes := int64(90)
	changed, err := c.UpdateWorkerWithResponse(ctx, id, &UpdateWorkerParams{}, Profile{IdleTimeoutMinutes: &minutes})
	if err != nil || changed.JSON200 == nil || *changed.JSON200.IdleTimeoutMinutes != 90 {
		t.Fatalf("change a worker: %v %s", err, changed.Body)
	}
	got, err := c.GetWorkerWithResponse(ctx, id)
	if err != nil || got.JSON200 == nil || got.JSON200.Name != "one" {
		t.Fatalf("get a worker: %v %s", err, got.Body)
	}
	idle, err := c.WorkerIdleStatusWithResponse(ctx, id)
	if err != nil || idle.JSON200 == nil || idle.JSON200.EligibleForPause {
		t.Fatalf("ask for the idle status: %v %s", err, idle.Body)
	}
	activity, err := c.WorkerActivityWithResponse(ctx, id)
	if err != nil || activity.JSON200 == nil || activity.JSON200.WorkerId != id {
		t.Fatalf("ask for the activity: %v %s", err, activity.Body)
	}
	why, err := c.WhyWorkerWithResponse(ctx, id)
	if err != nil || why.JSON200 == nil || why.JSON200.Answer == "" {
		t.Fatalf("ask why: %v %s", err, why.Body)
	}
	// The one call that a client of then cannot make: a termination has to be confirmed by now.
	unconfirmed, err := c.TerminateWorkerWithResponse(ctx, id, &TerminateWorkerParams{})
	if err != nil || unconfirmed.ApplicationproblemJSON422 == nil {
		t.Fatalf("terminate a worker without confirmation: %v %s", err, unconfirmed.Body)
	}
	confirm := func(_ context.Context, r *http.Request) error {
		const body = `{"confirm":"one"}`
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
		r.Header.Set("Content-Type", "application/json")
		return nil
	}
	ended, err := c.TerminateWorkerWithResponse(ctx, id, &TerminateWorkerParams{}, confirm)
	if err != nil || ended.JSON202 == nil || string(ended.JSON202.DesiredStatus) != "TERMINATED" {
		t.Fatalf("terminate a worker: %v %s", err, ended.Body)
	}
	audit, err := c.WorkerAuditWithResponse(ctx, id, &WorkerAuditParams{})
	if err != nil || audit.JSON200 == nil || len(*audit.JSON200.Items) < 3 {
		t.Fatalf("read the audit log: %v %s", err, audit.Body)
	}
	settings, err := c.ListSettingsWithResponse(ctx)
	if err != nil || settings.JSON200 == nil {
		t.Fatalf("list the settings: %v %s", err, settings.Body)
	}
}

// TestGeneratedClientReadsProblems: what is refused is a problem that the
// document describes.
func TestGeneratedClientReadsProblems(t *testing.T) {
	c := serve(t)
	ctx := t.Context()
	missing, err := c.GetWorkerWithResponse(ctx, "w-none")
	if err != nil || missing.ApplicationproblemJSON404 == nil {
		t.Errorf("a worker that is not there: %v %s", err, missing.Body)
	}
	states := []ListWorkersParamsStatus{"NONSENSE"}
	bad, err := c.ListWorkersWithResponse(ctx, &ListWorkersParams{Status: &states})
	if err != nil || bad.ApplicationproblemJSON422 == nil {
		t.Errorf("a status that is none: %v %s", err, bad.Body)
	}
	nobody := func(_ context.Context, r *http.Request) error { r.Header.Del("Authorization"); return nil }
	refused, err := c.ListSettingsWithResponse(ctx, nobody)
	if err != nil || refused.ApplicationproblemJSON401 == nil {
		t.Errorf("no token: %v %s", err, refused.Body)
	}
}

// serve runs a server over a store in memory, and the generated client of it.
func serve(t *testing.T) *ClientWithResponses {
	db := mem.New(mem.Options{}).Client()
	f, err := fleet.New(fleet.Options{Store: db, ID: "test"})
	if err != nil {
		t.Fatal(err)
	}
	tokens := access.New(db)
	token, err := tokens.First(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	api, err := server.New(server.Options{Fleet: f, Tokens: tokens})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- api.Run(ctx) }()
	web := httptest.NewServer(api.Handler())
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("the server ended with %v", err)
		}
		web.Close()
	})
	select {
	case <-api.Ready():
	case <-time.After(time.Minute):
		t.Fatal("the server does not get ready")
	}
	c, err := NewClientWithResponses(web.URL, WithRequestEditorFn(func(_ context.Context, r *http.Request) error {
		r.Header.Set("Authorization", "Bearer "+token)
		return nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

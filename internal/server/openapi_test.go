package server_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/hibernacle/hibernacle/api"
	"github.com/hibernacle/hibernacle/internal/sandbox"
)

func document(t *testing.T) *openapi3.T {
	t.Helper()
	doc, err := openapi3.NewLoader().LoadFromData(api.OpenAPI)
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

func TestDocumentIsValid(t *testing.T) {
	if err := document(t).Validate(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestDocumentHasJustTheRoutes(t *testing.T) {
	doc := document(t)
	described := map[string]bool{}
	ids := map[string]bool{}
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			described[method+" "+path] = true
			if op.OperationID == "" || ids[op.OperationID] {
				t.Errorf("%s %s: the operation id %q is missing or not unique", method, path, op.OperationID)
			}
			ids[op.OperationID] = true
		}
	}
	for _, r := range newFixture(t).server.Routes() {
		method, path := r[0], strings.ReplaceAll(r[1], "...}", "}")
		found := false
		for d := range described {
			if m, p, _ := strings.Cut(d, " "); p == path && (method == "" || m == method) {
				found = true
				delete(described, d)
			}
		}
		if !found {
			t.Errorf("route %s %s is not described", method, path)
		}
	}
	for d := range described {
		t.Errorf("%s is described, but no route", d)
	}
}

// schemaOf returns the schema that the document has for an answer.
func schemaOf(t *testing.T, doc *openapi3.T, method, path string, status int, contentType string) *openapi3.Schema {
	t.Helper()
	item := doc.Paths.Value(path)
	if item == nil || item.GetOperation(method) == nil {
		t.Fatalf("%s %s is not described", method, path)
	}
	responses := item.GetOperation(method).Responses
	ref := responses.Status(status)
	if ref == nil {
		ref = responses.Default()
	}
	if ref == nil {
		t.Fatalf("%s %s: status %d is not described", method, path, status)
	}
	media := ref.Value.Content.Get(contentType)
	if media == nil || media.Schema == nil {
		t.Fatalf("%s %s: %d has no schema for %q", method, path, status, contentType)
	}
	return media.Schema.Value
}

// check compares a JSON text with a schema.
func check(t *testing.T, schema *openapi3.Schema, text string) {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v: %q", err, text)
	}
	if err := schema.VisitJSON(v, openapi3.EnableJSONSchema2020(), openapi3.MultiErrors()); err != nil {
		t.Errorf("%s\n%v", text, err)
	}
}

func TestAnswersAreAsDescribed(t *testing.T) {
	f := newFixture(t)
	doc := document(t)
	f.core.Steps = []sandbox.Progress{{Phase: "rootfs", Message: "fetch"}, {Phase: "image", Done: 1, Total: 2}}
	f.core.Found = sandbox.Verify{Objects: 1, Bytes: 2, Faults: []string{"pack x is damaged"}}
	id := f.create()
	f.do("POST", "/v1/sandboxes/"+id+"/exec", `{"cmd":["true"]}`)
	file := "?path=" + filepath.Join(f.home, "f")
	for _, c := range []struct {
		method, path, query, body string
		status                    int
	}{
		{"GET", "/v1/health", "", "", 204},
		{"GET", "/v1/version", "", "", 200},
		{"GET", "/v1/openapi.json", "", "", 200},
		{"POST", "/v1/sandboxes", "", `{"name":"b","labels":{"k":"v"},"env":{"A":"1"},"policy":{"idle_timeout":"1m","ports":{"80":"public"},"egress":{"allow":["10.0.0.0/8"]}}}`, 201},
		{"POST", "/v1/sandboxes", "", `{"name":"b"}`, 409},
		{"GET", "/v1/sandboxes", "", "", 200},
		{"GET", "/v1/sandboxes/{id}", "", "", 200},
		{"POST", "/v1/sandboxes/{id}/hold", "", `{"for":"30m","reason":"a demo"}`, 200},
		{"POST", "/v1/sandboxes/{id}/hold", "", `{}`, 400},
		{"GET", "/v1/sandboxes/{id}", "", "", 200},
		{"DELETE", "/v1/sandboxes/{id}/hold", "", "", 200},
		{"POST", "/v1/sandboxes/{id}/hibernate", "", "", 200},
		{"POST", "/v1/sandboxes/{id}/evict", "", `{"local":true}`, 200},
		{"GET", "/v1/sandboxes/{id}", "", "", 200},
		{"POST", "/v1/sandboxes/{id}/resume", "", "", 200},
		{"GET", "/v1/sandboxes/{id}/checkpoints", "", "", 200},
		{"POST", "/v1/sandboxes/{id}/checkpoints", "", "", 201},
		{"POST", "/v1/sandboxes/{id}/checkpoints", "", `{"name":"clean"}`, 201},
		{"POST", "/v1/sandboxes/{id}/checkpoints", "", `{"name":"clean"}`, 409},
		{"GET", "/v1/sandboxes/{id}/checkpoints", "", "", 200},
		{"POST", "/v1/sandboxes/{id}/restore", "", `{"checkpoint":"clean"}`, 200},
		{"POST", "/v1/sandboxes/{id}/restore", "", `{"checkpoint":"none"}`, 404},
		{"POST", "/v1/sandboxes/{id}/fork", "", "", 201},
		{"POST", "/v1/sandboxes/{id}/fork", "", `{"count":2,"checkpoint":"clean","name":"x","standby":true}`, 201},
		{"POST", "/v1/sandboxes/{id}/fork", "", `{"number":2}`, 400},
		{"POST", "/v1/templates/{name}/create-from", "", `{"sandbox":"b","checkpoint":""}`, 201},
		{"POST", "/v1/templates/{name}/create-from", "", `{"sandbox":"none"}`, 404},
		{"DELETE", "/v1/sandboxes/{id}/checkpoints/{checkpoint}", "", "", 204},
		{"DELETE", "/v1/sandboxes/{id}/checkpoints/{checkpoint}", "", "", 404},
		{"PATCH", "/v1/sandboxes/{id}", "", `{"policy":{"ttl":{"after":"30d"},"expires":{"at":"2040-01-01T00:00:00Z"},"timeout":{"after":"1h"},"checkpoints":{"every":"1h","keep":2},"hooks":[{"name":"a","event":"post-resume","command":["true"]}]},"labels":{"k":null}}`, 200},
		{"GET", "/v1/sandboxes/{id}/logs", "", "", 200},
		{"GET", "/v1/sandboxes/{id}/hooks", "", "", 200},
		{"POST", "/v1/sandboxes/{id}/exec", "", `{"cmd":["true"]}`, 200},
		{"POST", "/v1/sandboxes/{id}/exec", "", `{}`, 400},
		{"PUT", "/v1/sandboxes/{id}/files", file, "content", 204},
		{"GET", "/v1/sandboxes/{id}/files", file, "", 200},
		{"GET", "/v1/sandboxes/{id}/ports/{port}/connect", "", "", 426},
		{"DELETE", "/v1/sandboxes/{id}", "", "", 204},
		{"GET", "/v1/sandboxes/{id}", "", "", 404},
		{"POST", "/v1/templates", "", `{"name":"py"}`, 200},
		{"GET", "/v1/templates", "", "", 200},
		{"GET", "/v1/templates/{name}", "", "", 200},
		{"DELETE", "/v1/templates/{name}", "", "", 204},
		{"GET", "/v1/templates/{name}", "", "", 404},
		{"GET", "/v1/store/status", "", "", 200},
		{"POST", "/v1/drain", "", "", 200},
		{"POST", "/v1/drain", "", `{"undo":true}`, 200},
		{"PATCH", "/v1/sandboxes/{id}", "", `{"policy":{}}`, 404},
		{"POST", "/v1/store/verify", "", "", 200},
		{"POST", "/v1/store/verify", "", `{"remote":true}`, 200},
		{"POST", "/v1/store/verify", "", `{"remote":1}`, 400},
		{"POST", "/v1/store/collect", "", "", 200},
		{"POST", "/v1/store/collect", "", `{"dry_run":true}`, 200},
		{"POST", "/v1/store/collect", "", `{"dry":true}`, 400},
		{"POST", "/v1/store/import", "", "", 200},
		{"POST", "/v1/store/import", "", `{"take_over":true}`, 200},
		{"POST", "/v1/store/import", "", `{"take_over":1}`, 400},
		{"GET", "/v1/host", "", "", 200},
		{"GET", "/v1/events", "?follow=false", "", 200},
		{"GET", "/v1/events", "?after=x", "", 400},
		{"GET", "/metrics", "", "", 200},
		{"POST", "/v1/webhooks", "", `{"url":"http://127.0.0.1:1/x","types":["failed"],"sandbox":"b"}`, 201},
		{"POST", "/v1/webhooks", "", `{"url":"nonsense"}`, 400},
		{"GET", "/v1/webhooks", "", "", 200},
		{"POST", "/v1/webhooks/{hook}/test", "", "", 200},
		{"POST", "/v1/webhooks/{hook}/resume", "", "", 200},
		{"DELETE", "/v1/webhooks/{hook}", "", "", 204},
		{"DELETE", "/v1/webhooks/{hook}", "", "", 404},
	} {
		t.Run(fmt.Sprintf("%s %s %d", c.method, c.path, c.status), func(t *testing.T) {
			hook := ""
			if strings.Contains(c.path, "{hook}") {
				hook = f.hook()
				c.path = strings.Replace(c.path, "{hook}", "{id}", 1)
			}
			path := c.path
			if hook != "" {
				path = strings.Replace(path, "{id}", hook, 1)
			}
			path = strings.NewReplacer("{id}", id, "{port}", "80", "{name}", "py", "{checkpoint}", "clean").Replace(path)
			resp, body := f.do(c.method, path+c.query, c.body)
			if resp.StatusCode != c.status {
				t.Fatalf("status %d: %s", resp.StatusCode, body)
			}
			if c.status == http.StatusNoContent {
				if body != "" {
					t.Errorf("body %q", body)
				}
				return
			}
			contentType, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
			schema := schemaOf(t, doc, c.method, c.path, c.status, contentType)
			switch contentType {
			case "application/json":
				check(t, schema, body)
			case "application/x-ndjson":
				for l := range strings.Lines(body) {
					check(t, schema, l)
				}
			}
		})
	}
}

// TestRequestsAreAsDescribed compares the fields of the Go types that are
// decoded with those of the document.
func TestRequestsAreAsDescribed(t *testing.T) {
	doc := document(t)
	for name, v := range map[string]any{
		"CreateRequest": api.CreateRequest{}, "UpdateRequest": api.UpdateRequest{}, "Policy": api.Policy{}, "PolicyPatch": api.PolicyPatch{},
		"Limit": api.Limit{}, "Expires": api.Expires{}, "Schedule": api.Schedule{}, "Hook": api.Hook{}, "HookRun": api.HookRun{}, "Egress": api.Egress{}, "ExecRequest": api.ExecRequest{}, "BuildRequest": api.BuildRequest{},
		"Event": api.Event{}, "WebhookRequest": api.WebhookRequest{}, "Webhook": api.Webhook{}, "WebhookTest": api.WebhookTest{}, "Usage": api.Usage{},
		"Sandbox": api.Sandbox{}, "Template": api.Template{}, "Progress": api.Progress{}, "Version": api.Version{}, "Error": api.Error{},
		"StoreStatus": api.StoreStatus{}, "TierStatus": api.TierStatus{}, "StoreSandbox": api.StoreSandbox{}, "CollectRequest": api.CollectRequest{}, "VerifyRequest": api.VerifyRequest{},
		"Collected": api.Collected{}, "CollectedTier": api.CollectedTier{}, "ImportRequest": api.ImportRequest{}, "Imported": api.Imported{},
		"Checkpoint": api.Checkpoint{}, "CheckpointRequest": api.CheckpointRequest{}, "RestoreRequest": api.RestoreRequest{}, "Restored": api.Restored{},
		"ForkRequest": api.ForkRequest{}, "TemplateFromRequest": api.TemplateFromRequest{},
		"Lease": api.Lease{}, "Activity": api.Activity{}, "KeepAwake": api.KeepAwake{}, "HoldRequest": api.HoldRequest{}, "HibernateReport": api.HibernateReport{},
		"EvictRequest": api.EvictRequest{}, "DrainRequest": api.DrainRequest{}, "Drained": api.Drained{}, "Next": api.Next{}, "Evicted": api.Evicted{}, "Host": api.Host{},
	} {
		described := map[string]bool{}
		for field := range doc.Components.Schemas[name].Value.Properties {
			described[field] = true
		}
		for f := range reflect.TypeOf(v).Fields() {
			field, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if !described[field] {
				t.Errorf("%s: %s is not described", name, field)
			}
			delete(described, field)
		}
		for field := range described {
			t.Errorf("%s: %s is described, but not there", name, field)
		}
	}
}

// TestDocumentRefusesWrongAnswers makes sure that the comparisons above see
// something, behind references too.
func TestDocumentRefusesWrongAnswers(t *testing.T) {
	schema := document(t).Components.Schemas["Progress"].Value
	for _, text := range []string{`{"phase":1}`, `{"odd":1}`, `{"error":{"code":"odd","message":"","hint":""}}`, `{"verify":{"objects":1,"bytes":1}}`} {
		var v any
		if err := json.Unmarshal([]byte(text), &v); err != nil {
			t.Fatal(err)
		}
		if schema.VisitJSON(v, openapi3.EnableJSONSchema2020()) == nil {
			t.Errorf("%s is taken", text)
		}
	}
}

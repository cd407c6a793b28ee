# Everything that a developer or CI runs. `make help` lists the targets.
SHELL       := /bin/bash
GO          ?= go
VERSION     ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS     := -s -w -X main.version=$(VERSION)
CACHE       ?= $(CURDIR)/.cache
export HIB_TEST_CACHE := $(CACHE)
export HIB_TEST_BIN   := $(CURDIR)/bin

.PHONY: help deps build generate check test test-unit test-e2e demo bench clean

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-10s %s\n", $$1, $$2}'

deps: ## install what the host lacks (through apt, with root or sudo)
	@scripts/deps

build: ## build bin/hib and bin/hib-guest
	CGO_ENABLED=0 $(GO) build -buildvcs=false -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/...

# The S3 server of the tests, in a module of its own: it needs a hundred others.
bin/versitygw: tools/s3server/go.mod tools/s3server/go.sum
	@mkdir -p bin
	cd tools/s3server && CGO_ENABLED=0 $(GO) build -buildvcs=false -trimpath -ldflags '-s -w' -o $(CURDIR)/bin/ github.com/versity/versitygw/cmd/versitygw
	@touch $@

generate: ## make the protocol code anew from api/*/*.proto
	$(GO) generate ./api/...

check: ## formatting, vet, staticcheck
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { echo "not gofmt-ed:"; gofmt -l $$(git ls-files '*.go'); exit 1; }
	$(GO) vet ./...
	$(GO) tool staticcheck ./...

test: deps build check test-unit test-e2e ## install what is missing and pass every test, real microVMs included

test-unit: build bin/versitygw ## the tests of single packages
	scripts/fixtures
	. $(CACHE)/fixtures.env && $(GO) test -count=1 -timeout 20m ./api/... ./client/... ./cmd/... ./internal/...

test-e2e: build bin/versitygw ## real daemons with real microVMs: end to end, crashes, power loss
	scripts/fixtures
	. $(CACHE)/fixtures.env && $(GO) test -count=1 -timeout 60m -p 1 -v ./test/...

demo: deps build ## play the whole story on a private daemon, every figure measured on the spot
	$(GO) run ./demo

bench: deps build ## measure everything on this machine (BENCH: flags of hib bench)
	scripts/fixtures
	. $(CACHE)/fixtures.env && scripts/bench $(or $(BENCH),--full)

clean: ## remove what was built; the cache of downloads stays
	rm -rf bin

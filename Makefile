# Two commands do all the set-up: `make demo` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
DATE ?= $(shell git log -1 --format=%cI 2>/dev/null)
LDFLAGS := -s -w -X main.version=$(VERSION) -X main.buildDate=$(DATE)
# One way to compile for lint, build and tests, so that nothing is compiled twice;
# the race detector alone needs another.
export CGO_ENABLED := 0
export GOFLAGS := $(strip -trimpath $(filter-out -trimpath,$(GOFLAGS)))

# Debian packages that the tests drive as real peers.
PACKAGES := redis-server redis-tools postgresql postgresql-contrib nginx-light wrk haproxy \
	etcd-server awscli strace iproute2 procps util-linux gcc libc6-dev python3 curl systemd \
	openssh-server openssh-client tmux dbus-daemon chromium runc docker.io busybox-static python3-aiosmtpd \
	qemu-system-x86 e2fsprogs prometheus
# What only the full counts drive.
SOAK_PACKAGES := debootstrap debian-archive-keyring
# The kernel of microVMs in the tests; empty where it could not be fetched.
GUEST_KERNEL = $$([ -e bin/guest-kernel/boot ] && echo $(CURDIR)/bin/guest-kernel || true)

.PHONY: help build cross deb web demo test modules guest-kernel test-microvm soak bench bench-fleet bench-load bench-vm bench-agent lint generate packages clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

build: ## build bin/lull and bin/lull-shim
	go build -ldflags '$(LDFLAGS)' -o bin/ ./cmd/...

# macOS has the command line alone, Linux the helpers too.
CROSS ?= darwin/arm64 linux/arm64 darwin/amd64
cross: ## build for macOS and for arm64, in bin/cross
	@for t in $(CROSS); do echo "building for $$t"; \
		case $$t in darwin/*) what=./cmd/lull;; *) what=./cmd/...;; esac; \
		GOOS=$${t%/*} GOARCH=$${t#*/} go build -ldflags '$(LDFLAGS)' -o bin/cross/$$t/ $$what || exit 1; done

deb: build ## build the Debian package in dist/
	etc/deb/build '$(VERSION)' dist

web: ## build the dashboard from /web (needs npm; what it makes is committed)
	cd web && npm install --no-save --no-audit --no-fund && npm run build

demo: build ## run real programs that fall asleep and wake, and a simulated fleet; then print what to type
	@go build -o bin/lull-demo ./demo
	@[ -n "$${LULL_GUEST_KERNEL:-}" ] || [ -e bin/guest-kernel/boot ] || ! command -v qemu-system-x86_64 >/dev/null || { \
		echo "fetching a guest kernel for the microVM (26 MB)"; timeout 300 sh cmd/lull/guest-kernel.sh bin/guest-kernel || \
		echo "no guest kernel: the demo goes on without its microVM"; }
	@LULL_GUEST_KERNEL=$${LULL_GUEST_KERNEL:-$(GUEST_KERNEL)} exec bin/lull-demo

packages: ## install what the tests need (Debian, root)
	@missing=$$(for p in $(PACKAGES); do dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done); \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "not installed, tests that need them are skipped:" $$missing; exit 0; fi; \
	echo installing: $$missing; \
	printf '#!/bin/sh\nexit 101\n' > /tmp/lull-policy && chmod +x /tmp/lull-policy; \
	restore=''; if [ -e /usr/sbin/policy-rc.d ]; then mv /usr/sbin/policy-rc.d /usr/sbin/policy-rc.d.lull; restore=1; fi; \
	cp /tmp/lull-policy /usr/sbin/policy-rc.d; \
	ok=1; for try in 1 2 3; do \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			-o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 $$missing >/dev/null && { ok=0; break; } || sleep $$((try*5)); done; \
	rm -f /usr/sbin/policy-rc.d /tmp/lull-policy; \
	if [ -n "$$restore" ]; then mv /usr/sbin/policy-rc.d.lull /usr/sbin/policy-rc.d; fi; exit $$ok

# Tests that read or load the whole machine run one package at a time. They run
# programs, of which the cache of results knows nothing: -count=1.
ALONE := ./cmd/lull ./demo ./internal/daemon/agent ./internal/daemon/agent/realtest ./internal/daemon/host/realtest ./internal/daemon/host/programs \
	./internal/edge/runtime/microvm ./internal/daemon/host/machines ./internal/daemon/host/containers
# Packages with goroutines that are quick enough under the race detector.
RACE := ./internal/base/... ./internal/daemon/host ./internal/daemon/server/... ./internal/edge/sockets ./internal/edge/cml \
	./internal/edge/runtime/docker ./internal/edge/runtime/microvm/vnet ./internal/edge/oci \
	./internal/link/... ./internal/router ./internal/shim ./internal/sim/world ./internal/store/...

# A test that fails is run again by itself, twice at most. What passes then is
# listed as flaky at the end, with how it failed above: a fault to mend like any
# other. More than six failures, a data race and a panic are never tried again.
TEST = go tool gotestsum --format pkgname --rerun-fails=2 --rerun-fails-max-failures=6 \
	--rerun-fails-abort-on-data-race --rerun-fails-report bin/flaky-$@-$(1) \
	--jsonfile bin/tests-$@-$(1).json --packages="$(2)" -- $(3)

modules: ## fetch the modules; a proxy that fails once is asked again
	@for try in 1 2 3; do go mod download && exit 0; sleep $$((try*5)); done; exit 1

guest-kernel: packages ## fetch a kernel for the tests of microVMs (26 MB), once
	@[ -e bin/guest-kernel/boot ] || sh cmd/lull/guest-kernel.sh bin/guest-kernel || \
		echo "no guest kernel: tests of microVMs are skipped"

test: packages modules guest-kernel lint build ## everything that must hold; installs what it needs
	@rm -rf bin/flaky-* bin/tests-* bin/artifacts
	$(call TEST,main,$$(go list ./... | grep -vE '^lull/(cmd/lull|demo)$$|/daemon/agent(/realtest)?$$|/daemon/host/(realtest|programs|machines|containers)$$|/runtime/microvm$$' | tr '\n' ' '),-timeout 20m)
	LULL_ARTIFACTS=$(CURDIR)/bin/artifacts LULL_GUEST_KERNEL=$(GUEST_KERNEL) $(call TEST,alone,$(ALONE),-p 1 -count=1 -timeout 20m)
	CGO_ENABLED=1 $(call TEST,race,$(RACE),-race -short -timeout 20m)
	$(MAKE) --no-print-directory cross CROSS='darwin/arm64 linux/arm64'
	@LULL_RECORDS=$(CURDIR)/bin go test -count=1 -v -run TestNothingWasLeftOut ./internal/house | grep -v '^[=-]\|^PASS\|^ok'; exit $${PIPESTATUS[0]}
	@find bin/artifacts -name report.txt -exec sed 's/^/measured: /' {} + 2>/dev/null || true
	@for f in bin/flaky-*; do [ ! -s $$f ] || sed 's/^/flaky: /' $$f; done

test-microvm: guest-kernel ## only the tests that boot guests
	LULL_GUEST_KERNEL=$(GUEST_KERNEL) go test -p 1 -count=1 -timeout 20m ./internal/edge/runtime/microvm ./internal/daemon/host/machines
	LULL_GUEST_KERNEL=$(GUEST_KERNEL) go test -count=1 -timeout 30m -run TestConformance/microvm ./internal/daemon/host/realtest

soak: PACKAGES += $(SOAK_PACKAGES)
soak: packages guest-kernel build ## the proofs at their full counts; hours
	LULL_GUEST_KERNEL=$(GUEST_KERNEL) LULL_DEBOOTSTRAP=$$(command -v debootstrap || true) LULL_VSOCK_INSIDE=1 LULL_VM_CYCLES=20 LULL_INTERLEAVINGS=100 LULL_RANDOM_INTERLEAVINGS=1000000 LULL_SIM_CRASHES=5000 \
	LULL_PROGRAM_CYCLES=1000 LULL_SOAK=1 LULL_DAYS=20 LULL_SERVER_KILLS=200 LULL_NOTIFY_KILLS=200 LULL_CLUSTER_ROUNDS=20 LULL_HOST_RACES=20000 LULL_HOST_CRASHES=500 LULL_HOST_CYCLES=1000 LULL_CONFORMANCE_KILLS=200 \
		go test -p 1 -count=1 -timeout 24h ./...

bench-agent: build ## what the agent costs, beside node_exporter and collectd; a minute
	go run ./bench/agent
	go test -count=1 -run 'TestHour$$' -v ./internal/daemon/agent | grep 'an hour'

bench-vm: build guest-kernel ## microVMs on every rung of the ladder; minutes
	LULL_GUEST_KERNEL=$(GUEST_KERNEL) go run ./bench/vm

bench-fleet: build ## what a fleet of 1,000, 10,000 and 100,000 costs a server; 15 minutes
	go run ./bench/fleet -sizes 1000,10000,100000

bench-load: build ## the API and the event stream of 10,000 workers with 200 dashboards; 2 minutes
	go run ./bench/load

bench: build ## ratios against baselines measured in the same run
	go run ./bench/host
	go run ./bench/relay

lint: ## formatting and vet
	@bad=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$bad" ]; then echo "gofmt would change:" $$bad; exit 1; fi
	go vet ./...

generate: ## write the generated reference pages again
	go run ./cmd/lull reference docs/reference
	go test ./internal/power ./internal/house -update
	go test ./internal/daemon/agent -run TestFaultsPage -update
	go test ./internal/daemon/host/hosttest -run TestTable -update

clean: ## remove what was built
	rm -rf bin dist

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
	openssh-server openssh-client tmux dbus-daemon chromium runc docker.io docker-compose busybox-static python3-aiosmtpd \
	qemu-system-x86 e2fsprogs prometheus nodejs default-jre-headless gunicorn spin beanstalkd jupyter-server python3-ipykernel
# What only the full counts drive.
SOAK_PACKAGES := debootstrap debian-archive-keyring systemd-container rpm skopeo qemu-system-arm zsh fish rabbitmq-server slurmd slurmctld slurm-client munge cron jupyterhub podman
# The kernel of microVMs in the tests; empty where it could not be fetched.
KERNEL_GIVEN := $(LULL_GUEST_KERNEL)
GUEST_KERNEL = $(or $(KERNEL_GIVEN),$(shell [ ! -e bin/guest-kernel/boot ] || echo $(CURDIR)/bin/guest-kernel))

.PHONY: help build cross install uninstall deb release image web demo recording size check test test-compute test-programs test-servers test-guests test-machines programs build-darwin modules guest-kernel test-microvm soak bench bench-fleet bench-load bench-vm bench-agent lint generate packages clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# The programs that lull carries inside itself: $(call BUNDLE,linker flags).
BUNDLE = for h in lull-shim lull-harness; do f=internal/lib/bundle/files/$$h; \
	go build -ldflags '$(1)' -o $$f ./cmd/$$h && gzip -9nc $$f >$$f.gz && sha256sum $$f | cut -c1-64 >$$f.sha256 && rm $$f || exit 1; done

build: ## build bin/lull, one file that is enough, and the helpers inside it
	@$(call BUNDLE,$(LDFLAGS))
	go build -tags bundle -ldflags '$(LDFLAGS)' -o bin/ ./cmd/...

# macOS has the command line alone, Linux the helpers too.
CROSS ?= darwin/arm64 linux/arm64 darwin/amd64
cross: ## build for macOS and for arm64, in bin/cross
	@for t in $(CROSS); do echo "building for $$t"; export GOOS=$${t%/*} GOARCH=$${t#*/}; \
		case $$t in darwin/*) what=./cmd/lull;; *) what='-tags bundle ./cmd/...'; $(call BUNDLE,$(LDFLAGS));; esac; \
		go build -ldflags '$(LDFLAGS)' -o bin/cross/$$t/ $$what || exit 1; done

PREFIX ?= /usr/local
DESTDIR ?=
BIN ?= bin
install: ## install what make build built: programs, units, completions, man pages (PREFIX, DESTDIR)
	@[ -x $(BIN)/lull ] || $(MAKE) build
	etc/install '$(DESTDIR)' '$(PREFIX)' '$(BIN)'

uninstall: ## remove what make install installed
	etc/install --remove '$(DESTDIR)' '$(PREFIX)' '$(BIN)'

deb: build ## build the Debian package in dist/
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) etc/deb/build '$(VERSION)' dist

# Platforms of a release.
RELEASE ?= linux/amd64 linux/arm64 darwin/arm64 darwin/amd64
release: build ## programs, packages, container images, bills of materials and checksums for every platform, in dist/
	@rm -rf bin/cross bin/portable dist; $(AGAIN) cross CROSS='$(RELEASE)'
	@go build -tags portable -ldflags '$(LDFLAGS)' -o bin/portable/ ./cmd/lull # writes the manual pages for macOS
	@for t in $(RELEASE); do case $$t in darwin/*) run=bin/portable;; *) run=bin;; esac; \
		SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) etc/release/build '$(VERSION)' $$t bin/cross/$$t dist $$run || exit 1; done
	@cd dist && sha256sum *.deb *.rpm *.apk *.tar *.tar.gz *.cdx.json >SHA256SUMS && cat SHA256SUMS

image: build ## the container image for this machine, in dist/lull.oci.tar; take it with docker load or podman load
	@mkdir -p dist; SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) go run ./bench/image -version '$(VERSION)' -arch "$$(go env GOARCH)" bin/lull >dist/lull.oci.tar

web: ## build the dashboard from /web (needs npm; what it makes is committed)
	cd web && npm install --no-save --no-audit --no-fund && npm run build

demo: build ## build lull and run lull demo: programs that fall asleep and wake, and a simulated fleet
	@[ -n "$${LULL_GUEST_KERNEL:-}" ] || [ -e bin/guest-kernel/boot ] || ! command -v qemu-system-x86_64 >/dev/null || { \
		echo "fetching a guest kernel for the microVM (26 MB)"; timeout 300 sh cmd/lull/guest-kernel.sh bin/guest-kernel || \
		echo "no guest kernel: the demo runs without its microVM"; }
	@LULL_GUEST_KERNEL=$${LULL_GUEST_KERNEL:-$(GUEST_KERNEL)} exec bin/lull demo

recording: build ## record lull demo for the README, in docs/pictures/demo.svg
	go run ./demo

size: build ## write docs/reference/size.md: what takes the space in the programs; a minute
	go run ./bench/size

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

# Every package is in one lane, and a new one is in the first. Patterns are those
# of go list; internal/archtest holds the lists to what the tests do.
#
#   pure      starts no program: what no list below has
#   RACE      has goroutines and is quick enough under the race detector
#   MIXED     bubbles and programs; -short leaves the programs out
#   PROGRAMS  starts programs and mostly waits for them
#   SERVERS   starts servers, after the dashboard in a browser
#   GUESTS    boots guests, each of which takes a core
#   MACHINES  boots guests too, beside GUESTS
RACE := ./internal/lib/... ./internal/host/... ./internal/server/... ./internal/platform/cml \
	./internal/runtime/docker ./internal/runtime/microvm/vnet ./internal/platform/oci ./internal/platform/sockets \
	./internal/protocol/... ./internal/relay ./internal/shim ./internal/sim/world ./internal/store/...
MIXED := ./internal/agent ./internal/platform/activity ./internal/platform/cgroup ./internal/platform/desktop ./internal/platform/proc ./internal/platform/smtp \
	./internal/guestagent/... ./internal/sim/simtest
PROGRAMS := ./cmd/lull ./test/e2e/host ./test/e2e/agent ./test/e2e/programs ./test/e2e/containers ./test/e2e/units \
	./internal/platform/etcd/... ./internal/runtime/process ./test/mutants
SERVERS := ./test/e2e/server ./test/e2e/foreign
GUESTS := ./internal/runtime/microvm ./test/e2e/demo
MACHINES := ./test/e2e/machines
# Tests that run in another lane than their package: the walks of the fence, which
# the race detector makes too slow, the suite of conformance over guests, and the
# dashboard in a browser.
WALKS := ^TestFence
BOOTS := ^TestConformance$$/^microvm$$
BROWSERS := ^Test(Local)?Dashboard

# Programs that tests run, each built once; package programtest has the same flags.
BIN_DIR := $(CURDIR)/bin/programs
TEST_LDFLAGS := -s -w -X main.version=v9 -X main.buildDate=2026-01-02T03:04:05Z

# This Makefile again; make -n would run a line that names it otherwise.
AGAIN := env MAKEFLAGS= $(MAKE) --no-print-directory
# $(call TEST,lane,packages,flags). make lint vets, so that the tests need not, and
# programs without symbols are linked in half the time.
# No test is repeated: one that fails now and then is a bug to fix. A package that
# takes half an hour, at three times its time beside busy lanes, hangs.
TEST = go tool gotestsum --format pkgname --hide-summary=skipped --jsonfile bin/tests-$(1).json --packages="$(2)" -- -vet=off -ldflags=-s -timeout 60m $(3)
# $(call TOOK,lane) begins the recipe of a lane, and notes how long it took, and
# the user and system time of its processes.
TOOK = trap 'times >bin/times-$(1); printf "lane: %6d s: %s, CPU %s\n" $$SECONDS $(1) "$$(tail -1 bin/times-$(1))" >bin/lane-$(1).txt' EXIT
# What no list has.
PURE = $$(comm -23 <(go list ./... | sort) <(go list $(RACE) $(MIXED) $(PROGRAMS) $(SERVERS) $(GUESTS) $(MACHINES) | sort) | tr '\n' ' ')

modules: ## fetch the modules; a proxy that fails once is asked again
	@for try in 1 2 3; do go mod download && (cd test/e2e/foreign/testdata/emulator && go mod download) && (cd test/e2e/programs/testdata/minecraft && go mod download) && exit 0; sleep $$((try*5)); done; exit 1

guest-kernel: packages ## fetch a kernel for the tests of microVMs (26 MB), once
	@[ -e bin/guest-kernel/boot ] || sh cmd/lull/guest-kernel.sh bin/guest-kernel || \
		echo "no guest kernel: tests of microVMs are skipped"

check: lint ## the inner loop: format, vet, staticcheck, pure tests and the types of the dashboard; two minutes
	@go tool staticcheck -checks "SA*,S1*,U1000" ./...
	@LULL_DRAWS=$${LULL_DRAWS:-0.1} $(call TEST,check,$(PURE) $$(go list $(RACE) $(MIXED) | tr '\n' ' '),-short)
	@if [ -e web/node_modules/.bin/tsc ]; then cd web && node_modules/.bin/tsc --noEmit; else \
		echo "the dashboard's types are not checked: run npm install in web/ once"; fi

test: packages modules guest-kernel programs ## everything that must hold; installs what it needs
	@rm -rf bin/tests-* bin/lane-* bin/times-* bin/records.txt bin/artifacts
	@ok=0; $(AGAIN) -k -j5 test-compute test-programs test-servers test-guests test-machines || ok=1; \
		find bin/artifacts -name report.txt -exec sed 's/^/measured: /' {} + 2>/dev/null || true; \
		cat bin/lane-*; echo "make test: $$SECONDS s"; \
		LULL_RECORDS=$(CURDIR)/bin go test -count=1 -v -run TestNothingWasLeftOut ./internal/archtest >bin/records.txt || ok=1; \
		grep -v '^[=-]\|^PASS\|^ok\|^FAIL' bin/records.txt || true; \
		exit $$ok

# The five lanes run side by side: what computes gives way to what waits.
test-compute test-programs test-servers test-guests test-machines: export LULL_BIN_DIR := $(BIN_DIR)
test-programs test-servers test-guests test-machines test-microvm soak bench-vm: export LULL_GUEST_KERNEL = $(GUEST_KERNEL)

test-compute:
	@$(call TOOK,compute); ok=0; nice -n 10 $(AGAIN) lint build-darwin || ok=1; \
		CGO_ENABLED=1 nice -n 10 $(call TEST,race,$$(go list $(RACE) | tr '\n' ' '),-race -skip '$(WALKS)') || ok=1; \
		nice -n 10 $(call TEST,walks,./internal/host,-run '$(WALKS)') || ok=1; \
		nice -n 10 $(call TEST,pure,$(PURE),) || ok=1; \
		nice -n 10 $(call TEST,mixed,$$(go list $(MIXED) | tr '\n' ' '),-count=1) || ok=1; \
		exit $$ok

# Programs are not known to the cache of results: -count=1.
test-programs test-servers: export LULL_ARTIFACTS := $(CURDIR)/bin/artifacts
test-programs:
	@$(call TOOK,programs); $(call TEST,programs,$$(go list $(PROGRAMS) | tr '\n' ' '),-p 2 -parallel 3 -count=1 -skip '$(BOOTS)|$(BROWSERS)')

test-servers:
	@$(call TOOK,servers); ok=0; $(call TEST,browsers,./cmd/lull,-count=1 -run '$(BROWSERS)') || ok=1; \
		$(call TEST,servers,$$(go list $(SERVERS) | tr '\n' ' '),-p 2 -parallel 3 -count=1) || ok=1; \
		exit $$ok

test-guests:
	@$(call TOOK,guests); $(call TEST,guests,$$(go list $(GUESTS) | tr '\n' ' '),-p 1 -count=1)

test-machines:
	@$(call TOOK,machines); ok=0; $(call TEST,machines,$$(go list $(MACHINES) | tr '\n' ' '),-p 1 -count=1) || ok=1; \
		$(call TEST,boots,./test/e2e/host,-count=1 -run '$(BOOTS)') || ok=1; \
		exit $$ok

programs: ## build the programs that tests run, in bin/programs
	@mkdir -p $(BIN_DIR)
	@go build -ldflags '$(TEST_LDFLAGS)' -o $(BIN_DIR)/ ./cmd/...
	@$(call BUNDLE,$(TEST_LDFLAGS)); go build -tags bundle -ldflags '$(TEST_LDFLAGS)' -o $(BIN_DIR)/one/lull ./cmd/lull
	@for p in $$(git ls-files '*/testdata/*/main.go'); do p=$${p%/main.go}; \
		go build -ldflags '$(TEST_LDFLAGS)' -o $(BIN_DIR)/$${p//\//-} ./$$p || exit 1; done

build-darwin: # what ships for macOS compiles; go vet would want the tests, which are Linux's
	GOOS=darwin GOARCH=arm64 go build -o /dev/null ./cmd/lull

test-microvm: guest-kernel ## only the tests that boot guests
	go test -p 1 -count=1 -timeout 20m ./internal/runtime/microvm ./test/e2e/machines
	go test -count=1 -timeout 30m -run TestConformance/microvm ./test/e2e/host

soak: PACKAGES += $(SOAK_PACKAGES)
soak: packages guest-kernel release ## the proofs at their full counts; hours
	LULL_RELEASE=$(CURDIR)/dist LULL_RELEASE_IMAGE=$$(echo $(CURDIR)/dist/*_linux_amd64.oci.tar) LULL_DRAWS=$${LULL_DRAWS:-20} LULL_DEBOOTSTRAP=$$(command -v debootstrap || true) LULL_PODMAN=$$(command -v podman || true) LULL_VSOCK_INSIDE=1 LULL_VM_CYCLES=20 LULL_INTERLEAVINGS=100 LULL_TRACED_PERCENT=100 LULL_RANDOM_INTERLEAVINGS=1000000 LULL_SIM_CRASHES=5000 \
	LULL_PROGRAM_CYCLES=1000 LULL_COMPOSE_ROUNDS=200 LULL_CONTAINER_STOPS=100 LULL_HANDOFF_STARTS=200 LULL_HANDOFF_KILLS=20 LULL_SOAK=1 LULL_DAYS=20 LULL_MUTANTS=10 LULL_SERVER_KILLS=200 LULL_NOTIFY_KILLS=200 LULL_CLUSTER_ROUNDS=20 LULL_HOST_RACES=20000 LULL_HOST_CRASHES=500 LULL_HOST_CYCLES=1000 LULL_CONFORMANCE_KILLS=200 \
		go test -p 1 -count=1 -timeout 24h ./...

bench-agent: build ## what the agent costs, beside node_exporter and collectd; a minute
	go run ./bench/agent
	go test -count=1 -run 'TestHour$$' -v ./internal/agent | grep 'an hour'

bench-vm: build guest-kernel ## microVMs on every rung of the ladder; minutes
	go run ./bench/vm

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
	go test ./cmd/lull -run 'TestHelp$$' -update
	go test ./internal/core/power ./internal/archtest -update
	go test ./internal/agent -run TestFaultsPage -update
	go test ./internal/host/hosttest -run TestTable -update
	go test ./internal/host -run TestFenceModelKnowsTheSteps -update
	go test ./test/corpus -run 'TestCorpus$$' -update

clean: ## remove what was built
	rm -rf bin dist

# Every task of a developer or of CI. Needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install
INSTALL := $(PYTHON) scripts/pip_install.py

# The client of the JavaScript SDK is tested if Node 20 or newer is installed.
JAVASCRIPT := $(shell command -v npm >/dev/null && \
	node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' && echo .node-a2a/ready)

# The oldest and the newest supported codex; the pinned version is between them. The newest has no wheel.
OLDEST := .venv-codex-oldest
NEWEST := .venv-codex-newest
CODEX_NEWEST := 0.169.0

# The image: its name, the file for its list of contents, and the first engine that works. OPTIONS are further options of
# `$(ENGINE) build`.
TAG ?= codex-workspace
SBOM ?= build/sbom.cdx.json
ENGINE ?= $(or $(shell for engine in docker podman buildah; do $$engine info >/dev/null 2>&1 && echo $$engine && break; done),\
	$(error none of docker, podman and buildah works; on Debian, run `python3 -m image install` as root))
# Without the cache, because a test compares the image with that of another build, down to the times of files.
TEST_BUILD := --no-cache --network host --secret id=pip_conf,src=build/image/pip.conf --secret id=ca_bundle,src=build/image/ca_bundle

.DEFAULT_GOAL := help
.PHONY: help demo demo-platform demo-picture test test-slow test-exec test-postgresql test-oldest test-versions check lint types docs chaos \
	chaos-platform bench image image-test lock lock-hashes clean demo-setup test-setup clients-setup

help:            ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: demo-setup .venv/runtime  ## run the agent with the real codex and a scripted model: no key needed
	@$(BIN)/python -m codex_workspace demo

demo-platform: demo-setup .venv/runtime  ## run two agents on a simulated platform: one delegates work to the other
	@$(BIN)/python -m codex_workspace demo --platform

demo-picture: .venv/dev  ## record the first turn of the demo for the README: docs/demo.svg
	@$(BIN)/python scripts/demo_picture.py

TESTS := $(BIN)/python -m pytest
PARALLEL := --numprocesses 3 --dist worksteal

test: test-setup .venv/dev  ## run the tests, except the slow ones and those with codex exec
	$(TESTS) -m "not slow and not alone and not with_exec and not postgresql" $(PARALLEL)

test-slow: clients-setup .venv/dev .venv-a2a-0.3/ready $(JAVASCRIPT) $(OLDEST)/ready  ## run the slow tests: all clients, most end-to-end tests, chaos, packaging, …
	$(TESTS) -m "slow and not alone and not with_exec and not postgresql" $(PARALLEL)
	$(TESTS) -m "alone and not with_exec"

test-exec: test-setup .venv/dev .venv-a2a-0.3/ready    ## run the end-to-end tests with codex exec
	$(TESTS) -m "with_exec and not alone" $(PARALLEL)
	$(TESTS) -m "with_exec and alone"

test-postgresql: test-setup .venv/dev    ## run the tests with PostgreSQL (needs Debian's package postgresql)
	$(TESTS) -m postgresql --numprocesses 2

test-oldest: .venv/dev $(OLDEST)/ready      ## run the tests marked `versions` with the oldest codex
	CODEX_BIN=$(CURDIR)/$(OLDEST)/codex_cli_bin/bin/codex $(BIN)/python -m pytest -m versions --numprocesses 3

test-versions: .venv/dev .venv-a2a-0.3/ready $(OLDEST)/ready $(NEWEST)/ready  ## run every end-to-end test with the oldest and the newest codex (needs npm)
	@for codex in $(OLDEST)/codex_cli_bin/bin/codex $(NEWEST)/bin/codex; do \
		CODEX_BIN=$(CURDIR)/$$codex $(BIN)/python -m pytest tests/e2e -m "not alone and not postgresql" --numprocesses 2 && \
		CODEX_BIN=$(CURDIR)/$$codex $(BIN)/python -m pytest tests/e2e -m alone || exit; \
	done

check: lint types docs test test-slow test-exec test-postgresql test-oldest   ## run what CI runs: lint, types, docs, tests

lint: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/shellcheck start.sh .ci/run image/apt-get image/build image/builder-pip
	$(BIN)/hadolint Dockerfile

types: .venv/dev
	$(BIN)/mypy

chaos: .venv/dev         ## kill and stop processes for minutes and check that no message is lost (SEED= MESSAGES= STRIKES= DATABASE=postgresql)
	@$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) $(if $(MESSAGES),--messages $(MESSAGES)) \
		$(if $(STRIKES),--strikes $(STRIKES)) $(if $(DATABASE),--database $(DATABASE))

chaos-platform: .venv/dev    ## the same on a platform with faults (SEED= MESSAGES= DEATHS=)
	@$(BIN)/python -m tests.chaos.platform $(if $(SEED),--seed $(SEED)) $(if $(MESSAGES),--messages $(MESSAGES)) \
		$(if $(DEATHS),--deaths $(DEATHS))

bench: .venv/dev         ## compare speed and memory with a bare driver of codex (ROWS=warm,start ROUNDS=)
	@$(BIN)/python -m bench $(if $(ROWS),--rows $(ROWS)) $(if $(ROUNDS),--rounds $(ROUNDS))

image:           ## build the container image with docker, podman or buildah (TAG= SBOM= ENGINE= RUNTIME_VERSION= OPTIONS=)
	@image/build "$(ENGINE)" "$(TAG)" "$(SBOM)" --build-arg RUNTIME_VERSION=$(RUNTIME_VERSION) $(OPTIONS)

image-test: .venv/dev    ## build the image and test it in real containers
	$(BIN)/python -m image prepare
	BUILDAH_ISOLATION=chroot $(MAKE) image TAG=codex-workspace:test OPTIONS="$(TEST_BUILD)"
	$(BIN)/python -m pytest image -m "not alone" --numprocesses 2
	$(BIN)/python -m pytest image -m alone

lock: .venv/dev          ## update the pinned versions of all dependencies, and their hashes
	$(BIN)/pip-compile $(LOCK) $(UPGRADE) --extra postgres --output-file requirements.txt pyproject.toml
	@sed -i '/^$$/,$$d' requirements.txt
	@echo '# The image also installs molecule-ai-workspace-runtime if it is built with RUNTIME_VERSION.' >> requirements.txt
	$(BIN)/pip-compile $(LOCK) $(UPGRADE) --extra postgres --extra dev --constraint requirements.txt \
		--output-file requirements-dev.txt pyproject.toml
	@sed -i '/^$$/,$$d' requirements-dev.txt

lock-hashes: .venv/dev   ## update the hashes in the files whose versions are set by hand
	@mkdir -p build
	@for file in requirements-codex.txt requirements-codex-oldest.txt requirements-a2a-0.3.txt; do \
		sed -n 's/^\([^# ]*==[^ ]*\).*/\1/p' $$file > build/pins.in && rm -f build/pins.txt && \
		$(BIN)/pip-compile $(LOCK) --no-annotate --output-file build/pins.txt build/pins.in && \
		{ sed -n '/^#/p' $$file; cat build/pins.txt; } > build/pinned.txt && mv build/pinned.txt $$file || exit; \
	done

LOCK := --quiet --generate-hashes --strip-extras --annotation-style=line --no-header --no-emit-options \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host
# codex is left out: it is pinned in requirements-codex.txt, because the image has it in a layer of its own. A virtual
# environment has pip.
UPGRADE := --upgrade --unsafe-package openai-codex-cli-bin --unsafe-package pip

docs: .venv/dev          ## build the documentation site into build/site; fails on a broken link
	$(BIN)/python -m mkdocs build --strict
	@echo "Open build/site/index.html, or run: $(BIN)/python -m mkdocs serve"

clean:           ## remove everything that was installed, built and cached
	rm -rf build .venv .venv-a2a-0.3 $(OLDEST) $(NEWEST) .node-a2a .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Sizes and times below: measured on two cores with an empty cache.
demo-setup:
	@[ -e .venv/runtime ] || echo "First run: sets up .venv (170 MB to download, 1 to 2 minutes). The demo needs no network afterwards."

test-setup:
	@[ -e .venv/dev ] || echo "First run: sets up .venv (240 MB to download, 2 to 3 minutes)."

clients-setup: test-setup
	@[ -e $(OLDEST)/ready ] || echo "First run: sets up test clients and the oldest codex (175 MB to download, 1 to 2 minutes)."

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; name one: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	@echo "Creating .venv"
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/runtime: .venv/bin/python requirements.txt requirements-codex.txt
	@echo "Installing the Python packages into .venv (29 MB)"
	@$(INSTALL) $(BIN)/python requirements.txt
	@echo "Installing codex into .venv (142 MB)"
	@$(PIP) --no-deps --require-hashes -r requirements-codex.txt
	@touch $@

.venv/dev: .venv/runtime requirements-dev.txt
	@echo "Installing the development tools into .venv (68 MB)"
	@$(INSTALL) $(BIN)/python requirements-dev.txt
	@touch $@

# The older SDK cannot be installed beside the newer one.
.venv-a2a-0.3/ready: requirements-a2a-0.3.txt
	@echo "Installing the client of A2A 0.3 into .venv-a2a-0.3 (19 MB)"
	@$(PYTHON) -m venv .venv-a2a-0.3
	@$(INSTALL) .venv-a2a-0.3/bin/python requirements-a2a-0.3.txt
	@touch $@

$(OLDEST)/ready: requirements-codex-oldest.txt .venv/bin/python
	@echo "Installing the oldest supported codex into $(OLDEST) (138 MB)"
	@rm -rf $(OLDEST)
	@$(PIP) --no-deps --target $(OLDEST) --require-hashes -r requirements-codex-oldest.txt
	@touch $@

$(NEWEST)/ready: Makefile
	@echo "Installing the newest supported codex into $(NEWEST) (150 MB)"
	rm -rf $(NEWEST)
	mkdir $(NEWEST)
	cd $(NEWEST) && npm pack --silent @openai/codex@$(CODEX_NEWEST)-linux-$(if $(filter aarch64,$(shell uname -m)),arm64,x64)
	tar xzf $(NEWEST)/*.tgz -C $(NEWEST) --strip-components=3 --exclude=voice package/vendor
	rm $(NEWEST)/*.tgz
	@touch $@

.node-a2a/ready: tests/matrix/javascript/package.json tests/matrix/javascript/package-lock.json
	@echo "Installing the JavaScript client into .node-a2a (18 MB)"
	@mkdir -p .node-a2a
	@cp $^ .node-a2a
	@npm --prefix .node-a2a ci --ignore-scripts --no-audit --no-fund --loglevel error
	@touch $@

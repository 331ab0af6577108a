# Everything a person or CI does here. Needs Python 3.11 or newer and make; the rest is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet

# The JavaScript SDK's client is tested where there is a Node for it, 20 or newer.
JAVASCRIPT := $(shell command -v npm >/dev/null && \
	node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' && echo .node-a2a/ready)

# The ends of the supported range; in the middle is the pinned codex. The newest has no wheel.
OLDEST := .venv-codex-oldest
NEWEST := .venv-codex-newest
CODEX_NEWEST := 0.169.0

.DEFAULT_GOAL := help
.PHONY: help demo demo-platform demo-picture test test-exec test-oldest test-versions check lint types chaos \
	chaos-platform bench image image-test lock clean

help:            ## show what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: .venv/runtime      ## see the agent at work: no key, no network
	@$(BIN)/python -m codex_workspace demo

demo-platform: .venv/runtime  ## see two of them on a stand-in of the platform: one gives the other work
	@$(BIN)/python -m codex_workspace demo --platform

demo-picture: .venv/dev  ## record the first turn of the demo for the README: docs/demo.svg
	@$(BIN)/python scripts/demo_picture.py

test: .venv/dev .venv-a2a-0.3/ready $(JAVASCRIPT) $(OLDEST)/ready     ## the tests, but for those with codex exec
	$(BIN)/python -m pytest -m "not alone and not with_exec" --numprocesses 3 --dist worksteal
	$(BIN)/python -m pytest -m "alone and not with_exec"

test-exec: .venv/dev .venv-a2a-0.3/ready    ## end to end with codex exec, the client's tests again among them
	$(BIN)/python -m pytest -m "with_exec and not alone" --numprocesses 3 --dist worksteal
	$(BIN)/python -m pytest -m "with_exec and alone"

test-oldest: .venv/dev $(OLDEST)/ready      ## the tests marked versions, with the oldest codex
	CODEX_BIN=$(CURDIR)/$(OLDEST)/codex_cli_bin/bin/codex $(BIN)/python -m pytest -m versions --numprocesses 3

test-versions: .venv/dev .venv-a2a-0.3/ready $(OLDEST)/ready $(NEWEST)/ready  ## every end-to-end test with the oldest and the newest codex (needs npm)
	@for codex in $(OLDEST)/codex_cli_bin/bin/codex $(NEWEST)/bin/codex; do \
		CODEX_BIN=$(CURDIR)/$$codex $(BIN)/python -m pytest tests/e2e -m "not alone" --numprocesses 2 && \
		CODEX_BIN=$(CURDIR)/$$codex $(BIN)/python -m pytest tests/e2e -m alone || exit; \
	done

check: lint types test test-exec test-oldest   ## what CI runs: lint, types, tests

lint: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/shellcheck start.sh .ci/run image/builder-pip image/slim
	$(BIN)/hadolint Dockerfile

types: .venv/dev
	$(BIN)/mypy

chaos: .venv/dev         ## strike everything down for minutes, and see that nothing is lost (SEED= MESSAGES= STRIKES=)
	@$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) $(if $(MESSAGES),--messages $(MESSAGES)) \
		$(if $(STRIKES),--strikes $(STRIKES))

chaos-platform: .venv/dev    ## the same on a platform where everything goes wrong (SEED= MESSAGES= DEATHS=)
	@$(BIN)/python -m tests.chaos.platform $(if $(SEED),--seed $(SEED)) $(if $(MESSAGES),--messages $(MESSAGES)) \
		$(if $(DEATHS),--deaths $(DEATHS))

bench: .venv/dev         ## the benchmark tables
	@$(BIN)/python -m bench

image:           ## build the container image with docker, podman or buildah (TAG= ENGINE= RUNTIME_VERSION=)
	@$(PYTHON) -m image build $(if $(TAG),--tag $(TAG)) $(if $(ENGINE),--engine $(ENGINE)) \
		$(if $(RUNTIME_VERSION),--runtime-version $(RUNTIME_VERSION))

image-test: .venv/dev    ## build it and hold it to its contract, in real containers
	$(BIN)/python -m image build --tag codex-workspace:test
	$(BIN)/python -m pytest image -m "not alone" --numprocesses 2
	$(BIN)/python -m pytest image -m alone

lock: .venv/dev          ## pin anew what pyproject.toml asks for
	$(BIN)/pip-compile $(LOCK) --output-file requirements.txt pyproject.toml
	@echo '# molecule-ai-workspace-runtime is installed beside these where the image is built with RUNTIME_VERSION' \
		>> requirements.txt
	$(BIN)/pip-compile $(LOCK) --extra dev --constraint requirements.txt --output-file requirements-dev.txt pyproject.toml

LOCK := --quiet --upgrade --strip-extras --annotation-style=line --no-header --no-emit-options --no-emit-index-url \
	--no-emit-find-links --no-emit-trusted-host

clean:           ## remove what was installed and cached
	rm -rf .venv .venv-a2a-0.3 $(OLDEST) $(NEWEST) .node-a2a .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("this needs Python 3.11 or newer; name one: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv

.venv/runtime: .venv/bin/python requirements.txt requirements-codex.txt
	$(PIP) -r requirements.txt
	$(PIP) --no-deps -r requirements-codex.txt
	@touch $@

.venv/dev: .venv/runtime requirements-dev.txt
	$(PIP) -r requirements-dev.txt
	@touch $@

# The older SDK cannot live beside the newer one.
.venv-a2a-0.3/ready: requirements-a2a-0.3.txt
	$(PYTHON) -m venv .venv-a2a-0.3
	.venv-a2a-0.3/bin/python -m pip --disable-pip-version-check --no-input install --quiet -r requirements-a2a-0.3.txt
	@touch $@

$(OLDEST)/ready: requirements-codex-oldest.txt .venv/bin/python
	rm -rf $(OLDEST)
	$(PIP) --no-deps --target $(OLDEST) -r requirements-codex-oldest.txt
	@touch $@

$(NEWEST)/ready: Makefile
	rm -rf $(NEWEST)
	mkdir $(NEWEST)
	cd $(NEWEST) && npm pack --silent @openai/codex@$(CODEX_NEWEST)-linux-$(if $(filter aarch64,$(shell uname -m)),arm64,x64)
	tar xzf $(NEWEST)/*.tgz -C $(NEWEST) --strip-components=3 --exclude=voice package/vendor
	rm $(NEWEST)/*.tgz
	@touch $@

.node-a2a/ready: tests/matrix/javascript/package.json tests/matrix/javascript/package-lock.json
	@mkdir -p .node-a2a
	cp $^ .node-a2a
	npm --prefix .node-a2a ci --ignore-scripts --no-audit --no-fund --loglevel error
	@touch $@

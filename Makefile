# `make demo` and `make test` are all that a newcomer needs; `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
AUDIT := .venv-audit
FLOORS := .venv-floors
SITE := .venv-site
NEWEST := .venv-newest
TRACKERS := .venv-trackers
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(wildcard tracer/native/*.[ch] analysis/replay/*.c)
TORCH ?= 2.6.0
OTHER := .venv-torch-$(TORCH)
SERVE ?= 1
ifndef SEED
SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
endif
# A property with many examples may take longer than any test of `make test`.
EXPLORING = --hypothesis-profile=nightly --hypothesis-seed=$(SEED) --timeout=3600 --override-ini=faulthandler_timeout=4000

# ruff follows no link by itself; behind the links of src/rankscope it sees the packages by their installed names.
SOURCES := . src/rankscope/*/

# Two processes more than there are cores share the test files: tests wait for half of their time, for other processes,
# pages and timeouts. Each may take 2 GB, so they are eight at most. Tests that measure or keep a pace run last, with no
# other test beside them. A run narrowed by ARGS uses one process, because starting more takes longer.
NUM_PROCESSES := $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() + 2, 8))' 2> /dev/null || echo 4)
PROCESSES := --numprocesses=$(NUM_PROCESSES) --dist=loadfile --no-loadscope-reorder --max-worker-restart=0
SHARED_RUN := -m "not alone and not nightly" $(PROCESSES) --durations=10
# These alone are collected: of all tests, it would take longer than they do.
ALONE := $(shell grep -rlF --include='test_*.py' 'pytest.mark.alone' tests)
FAST_RUN := -m "not nightly and not slow and not multiproc and not browser and not alone" $(PROCESSES)

.PHONY: help demo test test-fast nightly lint types check-imports collect pytest format diagnosis faults edges fuzz outage other-torch trackers floors newest lock audit site pictures browser servers clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

# The stamp stands for an installation of exactly these files, so a second run installs nothing. pip does not compile
# its 21,000 modules: Python does that with the 6,000 that are imported, once.
$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@command -v $(PYTHON) > /dev/null || { echo "rankscope needs Python 3.11 or newer, and there is no $(PYTHON): install it, or make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "rankscope needs Python 3.11 or newer, this is %d.%d: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo "this Python has no venv module: install it (on Debian and Ubuntu the package python3-venv) and run again" >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing rankscope and its pinned dependencies into $(VENV) (once; torch is large, so a few minutes)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-compile --constraint constraints.txt --editable ".[embedded,alerts,trainer,notebook,dev]" | grep -E --line-buffered '^(Collecting|Downloading|Installing collected|Successfully)' | cut -c1-100; exit $${PIPESTATUS[0]}
	@touch $@

demo: $(STAMP) ## train on 8 local processes with one slow rank, diagnose it, serve the dashboard (SERVE=0: exit after the diagnosis)
	@$(BIN)/rankscope demo $(if $(filter 0,$(SERVE)),--no-serve) $(ARGS)

test: $(STAMP) ## everything that a submission must pass
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint types check-imports collect browser servers
	@$(MAKE) --no-print-directory pytest

test-fast: $(STAMP) ## lint, and the tests that are quick and start no processes
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python -m pytest $(FAST_RUN)

nightly: $(STAMP) browser servers ## all tests; hypothesis explores with more examples and a fresh seed: make nightly SEED=7 repeats one
	@echo "hypothesis seed $(SEED): make nightly SEED=$(SEED) tries the same examples"
	@$(BIN)/python -m pytest -m "not alone" $(PROCESSES) $(EXPLORING)
	@$(BIN)/python -m pytest -m alone $(EXPLORING) $(ALONE)

lint: $(STAMP) ## ruff (lint and format), retired words
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/python -m tests.lint.retired_words

types: $(STAMP) ## mypy, strict
	@$(BIN)/mypy

check-imports: $(STAMP) ## the packages' direction of dependence
	@$(BIN)/lint-imports

collect: $(STAMP) ## import all tests: what this compiles, the processes of `pytest` load
	@$(BIN)/python -m pytest --collect-only --quiet --quiet | grep -v '^tests/.*: [0-9]*$$'; exit $${PIPESTATUS[0]}

pytest: $(STAMP) ## the tests and nothing else: make pytest ARGS="-k replay"
ifdef ARGS
	@$(BIN)/python -m pytest $(ARGS)
else
	@$(BIN)/python -m pytest $(SHARED_RUN)
	@$(BIN)/python -m pytest -m "alone and not nightly" $(ALONE)
endif

browser: ## a headless Chromium for the browser tests
	@./tests/browser/install_chromium.sh

servers: ## Prometheus, promtool, Alertmanager and nginx for tests
	@./tests/deploy/install_servers.sh

format: $(STAMP) ## rewrite the sources in the house format
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

diagnosis: $(STAMP) ## score the diagnosis on 1,350 simulated clusters: make diagnosis ARGS="--seed 3 --sizes small" (hours)
	$(BIN)/python -m benchmarks.diagnosis $(ARGS)

faults: $(STAMP) ## kill agent and collector at random, 300 times: make faults ARGS="100 7" for 100 cycles of seed 7 (20 minutes)
	@folder=$$(mktemp -d) && $(BIN)/python -m tests.faults.cycles $$folder/path $(or $(ARGS),300 1); status=$$?; rm -rf $$folder; exit $$status

edges: $(STAMP) ## send all odd values, each in a run of its own: make edges ARGS=--stored, or ARGS="--soak 3600 --seed 2" (30 minutes)
	@$(BIN)/python -m tests.faults.odd_runs $(ARGS)

fuzz: $(STAMP) ## break the files of a process guided by coverage: make fuzz ARGS="--seconds 3600 --seed 2" (10 minutes)
	@$(BIN)/python -c 'import atheris' 2> /dev/null || $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable ".[fuzz]"
	@$(BIN)/python -m tests.faults.fuzzing $(ARGS)

outage: $(STAMP) ## ten minutes without a collector at 64,000 spans/s (half an hour)
	$(BIN)/python -m benchmarks.data_path --outage 600 --seconds 1560 $(ARGS)

other-torch: ## the tracer's tests under another torch: make other-torch TORCH=2.8.0 PYTHON=python3.12 (10 minutes, some GB)
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@$(OTHER)/bin/python -m pip install --disable-pip-version-check --quiet torch==$(TORCH) accelerate dill hypothesis networkx numpy psutil pyarrow pytest pytest-timeout pytest-xdist transformers
	@$(OTHER)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --editable .
	@$(OTHER)/bin/python -m pytest tests/tracer --ignore tests/tracer/integrations -k "not torchtitan" --numprocesses 2 --timeout 150 $(ARGS)

trackers: ## the tests of the trackers with the newest of each, in an environment of its own (5 minutes, 1.5 GB)
	@test -x $(TRACKERS)/bin/python || $(PYTHON) -m venv $(TRACKERS)
	@$(TRACKERS)/bin/python -m pip install --disable-pip-version-check --quiet --upgrade ".[embedded]" hypothesis mlflow-skinny opentelemetry-exporter-otlp-proto-http opentelemetry-sdk pytest pytest-timeout tensorboard trackio wandb
	@$(TRACKERS)/bin/python -m pytest tests/rankscope/loggers $(ARGS)

floors: ## install the oldest versions that pyproject.toml allows into a new environment, and try all of it (3 minutes, 1.5 GB)
	@rm -rf $(FLOORS) && $(PYTHON) -m venv $(FLOORS)
	@grep -oE '"[a-z0-9-]+>=[0-9.]+' pyproject.toml | sed -E 's/"(.*)>=/\1==/' | grep -v '^torch==' > $(FLOORS)/oldest.txt
	@$(FLOORS)/bin/python -m pip install --disable-pip-version-check --quiet --constraint $(FLOORS)/oldest.txt ".[embedded,alerts]"
	@$(FLOORS)/bin/python -m tests.installed.smoke embedded

newest: ## the same with the newest versions that are published
	@rm -rf $(NEWEST) && $(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet --upgrade --upgrade-strategy eager ".[embedded,alerts]"
	@$(NEWEST)/bin/python -m tests.installed.smoke embedded

lock: $(STAMP) ## write constraints.txt and deploy/requirements.txt anew from what the environment holds
	@$(BIN)/python -m pip freeze --all --exclude pip --exclude wheel --exclude-editable | sed -E 's/\+cpu$$//' > constraints.txt
	@$(BIN)/python -m deploy.pin_image

audit: ## ask a database of known holes about all that is pinned; what it does not know fails (needs the network)
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip install --disable-pip-version-check --quiet ".[audit]"; }
	@$(AUDIT)/bin/pip-audit --strict --disable-pip --require-hashes --requirement deploy/requirements.txt
	@$(AUDIT)/bin/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

# The reference shows an example as code only below the other word of the style.
site: ## build the documents as pages into build/site; a broken link fails
	@test -e $(SITE)/.installed -a $(SITE)/.installed -nt docs/requirements.txt || { $(PYTHON) -m venv $(SITE) && $(SITE)/bin/python -m pip install --disable-pip-version-check --quiet --requirement docs/requirements.txt && touch $(SITE)/.installed; }
	@rm -rf build/pages build/site && mkdir -p build/pages
	@cp -r --parents *.md LICENSE docs notebooks/*.ipynb benchmarks/results $(wildcard examples) build/pages
	@find build/pages -name '*.md' -exec sed -i -E 's#\[(docs/)?([a-z-]+)\.md\]\(#[\2](#g' {} +
	@rm -rf build/sources && cp -rL src build/sources && find build/sources -name '*.py' -exec sed -i -E 's/^( *)Example:$$/\1Examples:/' {} +
	@$(SITE)/bin/zensical build --clean --strict

pictures: $(STAMP) ## draw the pictures of the documents anew, from simulated runs (minutes)
	@$(BIN)/python docs/pictures.py $(ARGS)
	@$(BIN)/python docs/tour_pictures.py

clean: ## remove what the targets made
	@rm -rf $(VENV) $(AUDIT) $(FLOORS) $(NEWEST) $(SITE) $(TRACKERS) .venv-torch-* build dist *.egg-info tracer/native/_hot*.so analysis/replay/_loop*.so .mypy_cache .ruff_cache .pytest_cache

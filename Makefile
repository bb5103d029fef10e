# `make demo` and `make test` are all that a newcomer needs; `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SERVE ?= 1
ARGS ?=

.PHONY: help demo test lint types check-imports pytest format lock browser clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "rankscope needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing rankscope and its pinned dependencies into $(VENV) (once; a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[server,trainer,notebook,dev]"
	@touch $@

demo: $(STAMP) ## train on 8 local processes with one slow rank, diagnose it, serve the dashboard (SERVE=0: exit after the diagnosis)
	@$(BIN)/rankscope demo $(if $(filter 0,$(SERVE)),--no-serve) $(ARGS)

test: $(STAMP) browser lint types check-imports pytest ## everything that a submission must pass

lint: $(STAMP) ## ruff, linting and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict
	@$(BIN)/mypy

check-imports: $(STAMP) ## the packages' direction of dependence
	@$(BIN)/lint-imports

pytest: $(STAMP) ## the tests alone: make pytest ARGS="-k replay"
	@$(BIN)/python -m pytest $(ARGS)

browser: ## a headless Chromium for the browser tests
	@./tests/browser/install_chromium.sh

format: $(STAMP) ## rewrite the sources in the house format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: $(STAMP) ## write constraints.txt anew from what the environment holds
	@$(BIN)/python -m pip freeze --exclude-editable | sed -E 's/\+cpu$$//' > constraints.txt

clean: ## remove what the targets made
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

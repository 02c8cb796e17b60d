# `make setup` once, then `make check test`. Continuous integration runs the same targets.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Installed on its own and first: without the exact pin pip may pick a build with gigabytes of CUDA.
TORCH ?= torch==2.13.0
# Exports load with transformers 4 and the newest, too: tests put these before the installed ones.
TRANSFORMERS_4 := transformers==4.57.6 huggingface_hub==0.36.2 tokenizers==0.22.2
TRANSFORMERS_NEWEST := transformers==5.24.0
# The newest megatron-core requires Python 3.12, so pip does not install it beside Python 3.11. Its
# wheel is pure Python except for the index of data sets, and is unpacked for tests.
MEGATRON ?= 0.19.2
MEGATRON_NEWEST := $(VENV)/megatron_newest

# What `make setup` does not compile: tests import these modules rarely or never.
UNUSED := '/(tests|mypy|mypyc|pip|sklearn|nltk|fontTools|narwhals|backrefs|sympy/physics)/|/transformers/models/(?!auto/|__init__)'

# Tests of what differs between versions of megatron-core: modules that it builds, steps, optimizers
# and checkpoints. `make test-full` runs all tests of mcore with both.
MEGATRON_TESTS ?= $(patsubst %,tests/unit/mcore/test_%.py, \
	attention checkpoint_saving compat fusions graph layers loaded_weights one_step optimizer_options \
	optimizer_shards output_layer runtime stage_tensor trainable)

# Processes that run tests, one thread each; a test may start four more.
WORKERS ?= 2

# For `test-vllm`: make test-vllm VLLM=0.33.0 VLLM_TORCH=2.14.1 VLLM_PYTHON=python3.11
VLLM ?= 0.24.0
VLLM_TORCH ?= 2.11.0
VLLM_PYTHON ?= python3.12
VLLM_VENV := .venv-vllm-$(VLLM)

.PHONY: setup check fmt fmt-check lint types imports test test-research test-megatron test-gpu test-slurm test-vllm test-faults test-mutations test-full docs demo

# All cores compile what pip has installed, which pip would do on one, except UNUSED. Templates do not
# compile. `make -j 2 setup` installs the other versions beside the packages.
setup: $(STAMP)

$(STAMP): $(VENV)/.packages $(VENV)/.other_versions
	$(BIN)/python -W ignore -m compileall -qq -j 0 -x $(UNUSED) $(VENV)/lib $(VENV)/transformers4 $(VENV)/transformers_newest || true
	touch $(STAMP)

# The pip that comes with Python 3.11 takes twice the time to choose versions.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip

$(VENV)/.packages: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --no-compile $(TORCH)
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[all,dev,docs]'
	touch $@

$(VENV)/.other_versions: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --no-compile --no-deps --target $(VENV)/transformers4 $(TRANSFORMERS_4)
	$(BIN)/python -m pip install --no-compile --no-deps --target $(VENV)/transformers_newest $(TRANSFORMERS_NEWEST)
	rm -rf $(MEGATRON_NEWEST)
	$(BIN)/python -m pip download --no-deps --only-binary=:all: --python-version 3.12 \
		--dest $(MEGATRON_NEWEST)/wheel megatron-core==$(MEGATRON) \
		&& $(BIN)/python -m zipfile -e $(MEGATRON_NEWEST)/wheel/*.whl $(MEGATRON_NEWEST) \
		&& $(BIN)/python -W ignore -m compileall -q $(MEGATRON_NEWEST) \
		|| { rm -rf $(MEGATRON_NEWEST); echo "no megatron-core $(MEGATRON): its tests are skipped"; }
	touch $@

check: fmt-check lint types imports

fmt: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fmt-check: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports --no-cache

# A file's tests stay in one process, so that what they share is made once; tests/conftest.py orders.
test: $(STAMP)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not multi_gpu and not slurm and not faults and not research"

# The experiments in research/; the default tests have one quick test of them.
test-research: $(STAMP)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/research

# The newest megatron-core in place of the installed one. Tests of test cases run with that one only.
test-megatron: $(STAMP)
	test -d $(MEGATRON_NEWEST) || { echo "skipped: $(MEGATRON_NEWEST) is absent"; exit 0; }; \
	PYTHONPATH=$(MEGATRON_NEWEST) $(BIN)/pytest -n $(WORKERS) --dist loadfile $(MEGATRON_TESTS) \
		--ignore tests/unit/mcore/test_megatron_versions.py -m "not slow" \
		-k "not cases_distinguish"

# On a machine with a GPU; TORCH chooses a CUDA build when the environment is set up.
test-gpu: $(STAMP)
	$(BIN)/pytest -m gpu tests/gpu

# Starts a SLURM of its own: apt-get install slurmctld slurmd slurm-client munge
test-slurm: $(STAMP)
	$(BIN)/pytest -m slurm tests/e2e/test_slurm.py

# vLLM's engine on a CPU, in an environment of its own: vLLM needs another torch than this package.
test-vllm:
	test -x $(VLLM_VENV)/bin/python || $(VLLM_PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install torch==$(VLLM_TORCH)
	$(VLLM_VENV)/bin/pip install --no-deps vllm==$(VLLM)
	$(VLLM_VENV)/bin/pip install -r tests/support/vllm_requirements.txt
	PYTHONPATH=. $(VLLM_VENV)/bin/python -m pytest tests/unit/vllm_plugin

# Kills, damage, full disks, NaN: docs/guides/reliability.md quotes the table that it prints.
test-faults: $(STAMP)
	$(BIN)/pytest -m faults -s tests/faults

# Breaks a copy of the code in known ways; each time a named test must fail.
test-mutations: $(STAMP)
	$(BIN)/python -m tests.mutations

test-full: $(STAMP)
	DMS_FULL_MATRIX=1 $(BIN)/pytest
	$(MAKE) test-megatron MEGATRON_TESTS=tests/unit/mcore

# The documentation in site/; a broken link or a page that loads from another host is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# make demo MODEL=smollm2: the procedure on a real model, on two CPU cores
demo: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/demo$(if $(filter command line,$(origin MODEL)),_$(MODEL)).sh

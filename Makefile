# `make` or `make help` lists the targets. Variables, given as `make TARGET NAME=value`:
#   PYTHON  interpreter that .venv is made of (3.11 or later; default: python3). One that is named has an environment
#           of its own: PYTHON=python3.12 makes .venv-python3.12, with the newest Megatron-Core that is tested.
#           For test-gpu: the interpreter that runs the tests, with everything they need installed
#   ARGS    more arguments for pytest, e.g. ARGS="-k zigzag -x"
#   WORKERS processes that share the CPU tests (default: 3, for 2 cores: tests also wait; each starts up to eight ranks)

PYTHON ?= python3
ARGS ?=
WORKERS ?= 3
VENV := .venv$(if $(filter-out file,$(origin PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The demo needs the extra `train` alone; an environment with everything has it.
DEMO := $(VENV)/.installed-train
RUNS := $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO))
CODE := megatron_longctx analysis tests docs
SCRIPTS := launch/*.sh launch/*.sbatch launch/submit tests/slurm/run.sh tests/training/compare/browser.sh .ci/run

# One thread a process: tests start up to eight ranks, which would otherwise fight over the cores. And bytecode is kept,
# although a container's environment may say otherwise: every process would compile all modules again.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

# What recipes/experiment/compare_modes.yaml sweeps.
MODES := zigzag ring striped helper double_ring node_gather tasp all_gather ulysses usp

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo compare browser test test-megatron-lm test-slurm test-gpu lint format types pictures docs wheel clean

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with everything the tests and the demo need

# Again whenever the dependencies change; the stamp comes last, so that an interrupted set-up starts over.
$(STAMP): EXTRA := dev
$(DEMO): EXTRA := train
$(STAMP) $(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
		"Python %s found, 3.11 or later is needed: make setup PYTHON=python3.11" % sys.version.split()[0])'
	@echo "== set-up: $(VENV) (once; several minutes where torch is downloaded) =="
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRA)]'
	@# Apart from the rest: layers of transformers call fla-core's kernels, also on CPUs, if they can import it.
	$(if $(filter dev,$(EXTRA)),$(BIN)/python -m pip install -c constraints.txt --no-deps --upgrade -t $(VENV)/fla-core fla-core)
	@touch $@

demo: $(RUNS) ## Train a small GPT with 4 context-parallel ranks and with 1, and compare them (CPU, minutes)
	$(BIN)/megatron-longctx demo
	@echo "Next, see what each of the 4 ranks holds, sends and attends to: $(BIN)/megatron-longctx plan experiment=demo"

compare: $(RUNS) ## Train with every context-parallel mode and with one rank, and make runs/compare.html (CPU, minutes)
	$(BIN)/megatron-longctx train experiment=compare_modes parallelism=single run.name=compare_modes-one_rank
	$(BIN)/megatron-longctx train -m experiment=compare_modes
	$(BIN)/megatron-longctx compare runs/compare_modes-one_rank $(foreach mode,$(MODES),runs/compare_modes-$(mode)) \
		--rows 5 --out runs/compare.png --html runs/compare.html

browser: setup ## Get a Chromium for the dashboard's test, where network and rights permit
	PYTHON=$(BIN)/python tests/training/compare/browser.sh

test: setup ## Run the CPU test suite
	$(TEST_ENV) $(BIN)/python -m pytest -m "not gpu" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-megatron-lm: setup ## Run Megatron-LM's own scripts on this attention (MEGATRON_LM=its checkout; minutes)
	$(BIN)/python -m pip install -q six
	$(TEST_ENV) $(BIN)/python -m pytest tests/integrations/test_megatron_lm.py tests/integrations/test_megatron_unit_tests.py $(ARGS)

test-slurm: setup ## Run the launch scripts on a real Slurm, which root installs where it is missing (minutes)
	PYTHON=$(BIN)/python tests/slurm/run.sh $(ARGS)

# On GPU machines torch and its friends are usually there already: PYTHON=... uses them and installs nothing.
ifeq ($(origin PYTHON),file)
test-gpu: setup ## Run the tests that need GPUs (PYTHON=python3: with that interpreter's own packages)
	$(BIN)/python -m pytest -m gpu $(ARGS)
else
test-gpu:
	$(PYTHON) -m pytest -m gpu $(ARGS)
endif

lint: setup ## Check style and format (ruff), and the shell scripts (shellcheck)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/python -m analysis.budgets
	$(BIN)/shellcheck --external-sources --shell=bash $(SCRIPTS)

format: setup ## Put the code into the project's format
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

types: setup ## Check types (mypy)
	$(BIN)/mypy

PICTURES := emulated extend inference memory plan reductions rows schedules
RESULTS := attention_packed_h200_x2 attention_peers_h200_x4

pictures: setup ## Draw the pictures of README and docs again, with today's code (minutes)
	$(BIN)/megatron-longctx demo
	cp runs/demo.png docs/images/demo.png
	for each in $(PICTURES); do $(BIN)/python -m analysis.pictures $$each || exit; done
	for each in $(RESULTS); do $(BIN)/python -m analysis.pictures attention analysis/results/$$each.json || exit; done
	$(BIN)/python -m analysis.pictures trees analysis/results/trees_h200_x2.json
	$(BIN)/python -m analysis.pictures hybrid analysis/results/hybrid_h200_x2.json

docs: setup ## Build the site of all pages into build/site (Sphinx, from the extra `docs`)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/sphinx-build -q -W --keep-going -c docs . build/site

wheel: setup ## Build the wheel into dist/
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean: ## Remove the environments, caches and built files (runs/ and data/ stay)
	rm -rf .venv .venv-* dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

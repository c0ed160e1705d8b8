# Two commands for a newcomer: `make demo` and `make test`. Everything they need, they install.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKDIR ?= work/demo
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo test test-slow test-chaos test-parity mutants lint docs recipes chapter walk gpu format clean
help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"bert_jax needs Python 3.11 or newer; {sys.executable} is {v.major}.{v.minor}. Name another: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing bert_jax into $(VENV) (about 1 GB, once)"
	$(PIP) --editable '.[baseline]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the test dependencies into $(VENV)"
	$(PIP) --editable '.[dev,data]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "Installing the documentation's generator into $(VENV)"
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.installed-parity: $(VENV)/.installed-dev
	@echo "Installing torch, transformers and libtpu into $(VENV)"
	$(PIP) --editable '.[parity,plan]'
	@touch $@

demo: $(VENV)/.installed  ## train a small BERT on the documentation of the installed packages
	$(BIN)/bert-jax demo --workdir=$(WORKDIR)

# Files are spread over processes (tests/conftest.py says over how many, and in which order). A test in
# a file comes after those above it.
PARALLEL := --numprocesses=auto --dist=loadfile --no-loadscope-reorder

test: $(VENV)/.installed$(if $(EVERY),-parity,-dev)  ## all tests (BERT_JAX_DATA=DIR adds those on real data, EVERY=1 those of test-slow and test-parity)
	$(BIN)/python -m pytest $(PARALLEL) $(if $(EVERY),-m '' -rs --no-fold-skipped)

test-slow: $(VENV)/.installed-dev  ## the tests that take longest: several processes, kills, a full disk
	$(BIN)/python -m pytest $(PARALLEL) -m slow

mutants: $(VENV)/.installed-parity  ## bugs of one line, each of which a test must find (SINCE=COMMIT: in files changed since)
	$(BIN)/python tests/mutants/run.py $(if $(SINCE),--since $(SINCE)) $(if $(AT_MOST),--at-most $(AT_MOST))

test-chaos: $(VENV)/.installed-dev  ## the long forms of kills, stalls, full disks, corruption and damaged files, and all exits: 20 minutes or more
	BERT_JAX_CHAOS=1 $(BIN)/python -m pytest $(PARALLEL) -m 'not parity' -rs tests/chaos tests/training/test_stalled.py \
		tests/training/test_remote_run.py tests/distributed/parallel/test_processes.py tests/test_fuzz.py \
		tests/training/finetune/test_finetune_run.py tests/training/finetune/test_finetune_tasks.py \
		tests/training/finetune/test_finetune_bucket.py tests/infer/test_inference_verbs.py \
		tests/artefacts/exchange/test_exits.py

test-parity: $(VENV)/.installed-parity  ## live comparison with transformers and torch (libtpu too: `make test` then compiles for TPUs)
	$(BIN)/python -m pytest $(PARALLEL) -m parity

lint: $(VENV)/.installed-dev  ## ruff, mypy, shellcheck, and the contract between layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck launch/*.sh launch/*.bash

docs: $(VENV)/.installed-docs  ## the documentation site, in work/site; a link that leads nowhere is an error
	$(BIN)/python -m sphinx -b html -W --keep-going -q -c docs/site docs work/site
	@echo "work/site/index.html"

recipes: $(VENV)/.installed-parity $(VENV)/.installed-docs  ## run the pages of docs/recipes as they are written, and one as a notebook: about 40 minutes
	$(BIN)/python tests/pages/run.py docs/recipes/*.md
	$(BIN)/python tests/pages/notebook.py docs/recipes/own_text.md

chapter: $(VENV)/.installed  ## run the pages of docs/chapter, from RNN to BERT, and compare what they print
	$(BIN)/python tests/pages/run.py docs/chapter/*.md

walk: $(VENV)/.installed  ## follow README.md from top to bottom, on 3 MB of text and 600 labelled rows: 40 minutes or more
	$(BIN)/python tests/pages/walk.py

# What is measured on GPUs, with an interpreter that is there: the environment's if there is one, or PYTHON=...
PART ?= all
GPU_PYTHON := $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(BIN)/python)),$(BIN)/python,$(PYTHON))

gpu:  ## measure on a GPU: PART=numerics|train|sweep|inference|all, CASE=NAME, PYTHON=python3 (installs nothing)
	$(GPU_PYTHON) benchmarks/gpu/measure.py --part='$(PART)' --case='$(CASE)' $(GPU_OPTIONS)

format: $(VENV)/.installed-dev  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and caches (not work/)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

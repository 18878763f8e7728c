# Every target sets up what it needs: a fresh machine needs python3 (3.11 to 3.13), pip and make.

PYTHON ?= python3
# Installed by itself and first, so that the pinned build is taken and nothing later chooses another.
TORCH  ?= torch==2.13.0

COUNT  ?= 5000
AGAIN  ?= 2000
SEED   ?= 0
ORDER  ?= 1
FRONTEND ?= trace
JOBS   ?= 2
BENCH  ?=
ROWS   ?=

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OTHERS := .venv-ecosystem

# Tests run side by side, and benchmarks want quiet: one thread each.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help env demo test lint types unit test-ops test-hf test-more test-gpu test-ecosystem fuzz bench bench-gpu size clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP)  ## make .venv and install everything into it, once

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[test,dev]'
	@touch $@

demo: $(STAMP)  ## train in eager, compiled exactly and compiled fast, side by side
	$(BIN)/python -m examples.demo

test: lint types unit  ## everything that has to pass before a change goes in

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) -q

test-ops: $(STAMP)  ## every op of torch's op database against eager, to ORDER (minutes)
	$(BIN)/python tests/ops/sweep.py --order $(ORDER)

test-hf: $(STAMP)  ## about a hundred small Hugging Face models, three steps each, against eager (minutes)
	$(BIN)/python -m pytest -n $(JOBS) -q tests/hf -m "zoo or not zoo"

test-more: $(STAMP)  ## the longer sweeps of the same kinds of programs that `make test` has some of (minutes)
	$(BIN)/python -m pytest -n $(JOBS) -q --ignore tests/hf -m zoo

test-gpu: $(STAMP)  ## what is tested on a GPU, where there is one
	$(BIN)/python -m pytest -q tests/gpu

test-ecosystem: $(OTHERS)/.installed  ## other people's libraries against eager, in .venv-ecosystem (downloads much)
	$(OTHERS)/bin/python -m pytest -q tests/ecosystem -W ignore -W error::aheadgrad.errors.FallbackWarning

$(OTHERS)/.installed: tests/ecosystem/requirements.txt pyproject.toml
	test -x $(OTHERS)/bin/python || $(PYTHON) -m venv $(OTHERS)
	$(OTHERS)/bin/python -m pip install --quiet $(TORCH)
	$(OTHERS)/bin/python -m pip install --quiet --constraint tests/ecosystem/constraints.txt \
		--requirement tests/ecosystem/requirements.txt --editable .
	$(OTHERS)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio  # builds for another torch
	@touch $@

fuzz: $(STAMP)  ## COUNT generated programs against eager, AGAIN of them also called again in other ways (SEED, ORDER, FRONTEND, JOBS, FUZZ)
	$(BIN)/python -m aheadgrad.testing.fuzz --count $(COUNT) --seed $(SEED) --order $(ORDER) --jobs $(JOBS) \
		--compiler $(FRONTEND) --replay $(AGAIN) $(FUZZ)

bench: $(STAMP)  ## side by side with torch; BENCH="step saved" runs some of it
	$(BIN)/python -m benchmarks $(BENCH)

bench-gpu: $(STAMP)  ## Inductor behind us and behind torch.compile, on a GPU; ROWS="gpt2-16 resnet50" runs some of it
	$(BIN)/python -m benchmarks.gpu $(ROWS)

size: $(STAMP)  ## lines per file; long files and functions stand out
	@$(BIN)/python .ci/size.py

clean:  ## remove what was made here, .venv too
	rm -rf $(VENV) $(OTHERS) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

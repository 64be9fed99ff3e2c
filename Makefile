# Everything here sets itself up first: on a bare machine with Python 3.11+, `make train` is the only command needed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory --no-builtin-rules

CONFIG ?= conf/grpo_smollm2.yaml
MODEL ?= smollm2
ARGS ?=
BIN := .venv/bin

.PHONY: help setup train test test-long chaos storm mutants lint format clean distclean

help: ## Show this list
	@echo "usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' Makefile
	@echo "for example: make train ARGS='num_steps=5 rollout.num_workers=2'"

setup: ## Make .venv, once (3 minutes); uses the CUDA builds if nvidia-smi finds a GPU
	@jobs/setup.sh

train: setup models/$(MODEL)/rlhf_prepare.json ## Train CONFIG (conf/grpo_smollm2.yaml); ARGS='key=value ...' overrides it
	@$(BIN)/rlhf train -c $(CONFIG) $(ARGS)

models/%/rlhf_prepare.json: | setup
	@echo "prepare: making models/$*"
	@TQDM_DISABLE=1 $(BIN)/rlhf prepare $* models/$*

test: setup ## Run the tests that need no GPU (a quarter of an hour); ARGS='-k name' chooses
	@env -u RAY_ADDRESS OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n 2 -m "not (gpu or long or slow or chaos)" $(ARGS)

test-long: setup ## Run more whole runs (25 minutes); CI runs both
	@env -u RAY_ADDRESS OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m long $(ARGS)

chaos: setup ## Kill 50 rollout workers of a run at random moments (a quarter of an hour)
	@env -u RAY_ADDRESS OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ray/test_pool.py -m chaos -s $(ARGS)

storm: setup models/tiny/rlhf_prepare.json ## 200 failures of every kind in one run, whose numbers must not change (two hours)
	@env -u RAY_ADDRESS OMP_NUM_THREADS=1 $(BIN)/python -m tests.storm $(ARGS)

mutants: setup ## Make faults, known ones and mutmut's, and see that tests notice; ARGS='ppo' selects by name
	@env -u RAY_ADDRESS OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(ARGS)
	@env -u RAY_ADDRESS OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants.generated $(ARGS)

lint: setup ## Check format, style, import directions and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyright

format: setup ## Format, and fix what ruff can fix safely
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove caches and build output
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## Remove .venv and the prepared models too; runs/ stays
	rm -rf .venv models

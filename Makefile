# The two commands of a fresh machine are `make demo` and `make test`; each sets up what it needs first.
# ARGS goes through: make demo ARGS="--max-tokens 32", make test ARGS="tests/test_scheduler.py -x".

PY := .venv/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test oldest lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup:  ## make .venv with all that development needs
	@sh scripts/setup.sh dev

demo:  ## set up, fetch a small model, answer a batch of prompts through the paged KV cache
	@sh scripts/setup.sh
	@$(PY) scripts/demo.py $(ARGS)

test:  ## set up and run all tests; without ARGS, those of `make oldest` before
	@sh scripts/setup.sh dev
	@oldest=0; $(if $(ARGS),:,sh scripts/test_oldest.sh) || oldest=$$?; \
	    $(PY) -m pytest $(ARGS) && exit $$oldest

oldest:  ## lower every kernel with the oldest JAX that pyproject.toml admits
	@sh scripts/setup.sh dev
	@sh scripts/test_oldest.sh

lint:  ## check style, formatting and types
	@sh scripts/setup.sh dev
	@failed=0; for check in "ruff check ." "ruff format --check ." pyright; do \
	    $(PY) -m $$check || failed=1; \
	done; exit $$failed

format:  ## fix what ruff can fix, and format
	@sh scripts/setup.sh dev
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean:  ## remove .venv, caches and build output
	@rm -rf .venv .venv-oldest .setup.log .setup-oldest.log .pytest_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

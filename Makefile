# `make demo`: a model answers.  `make test`: everything tested.  `make`: lint, then test.
SHELL := /bin/bash
PY := .venv/bin/python
# Idle OpenMP threads must sleep, not spin: on a busy machine spinning makes two threads far slower than one.
export OMP_WAIT_POLICY := passive

.PHONY: all demo install test lint format type bench gpu-test clean
all: lint test

demo:
	@scripts/install.sh run
	@.venv/bin/headrace generate demo --prompt "$(or $(PROMPT),What is the ocean? Answer in two sentences.)"

install:
	@scripts/install.sh dev

test:
	@scripts/install.sh test
	@scripts/test.sh $(ARGS)

lint: type
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

type:
	@scripts/install.sh dev
	@$(PY) -m mypy

format:
	@scripts/install.sh dev
	@$(PY) -m ruff check --fix -q .
	@$(PY) -m ruff format -q .

bench:
	@scripts/install.sh bench
	@$(PY) -m benchmarks.engine.cpu_demo $(ARGS)

gpu-test:
	@scripts/gpu/run.sh $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache

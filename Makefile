# Everything runs inside .venv, which is made when it is missing.
PYTHON ?= python3
# Installed first when no torch is there; on a GPU machine: make TORCH="torch>=2.13,<2.16"
TORCH ?= torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
RECIPE ?= quickstart
ARGS ?=
# Test processes; each takes one thread for its numerics.
WORKERS ?= logical

.PHONY: install train test lint format bench clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -c "import torch" 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

train: install  ## the main job: make data, train, evaluate, report; RECIPE=... ARGS="key=value ..."
	$(PY) -m recipes train $(RECIPE) $(ARGS)

test: install
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: install  ## what is claimed about the loader, measured on this machine; ARGS="--paced-steps 3000 --json FILE"
	$(PY) benchmarks/loaders.py $(ARGS)

clean:  ## environment and caches; runs are yours
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

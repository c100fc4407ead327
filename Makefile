# `make demo` and `make test` do everything on a fresh machine with Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
WORKERS ?= 2
KILLS ?= 100
INPUTS ?= 10000
PYTEST := $(BIN)/python -m pytest
SPREAD := -n $(WORKERS) --dist worksteal

.PHONY: install demo report test test-kernels test-slow test-gpu fuzz kill lint clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: install
	$(BIN)/uat demo

report: install
	$(BIN)/uat report results/paper --out docs/report

test: install
	$(PYTEST) $(SPREAD) -m 'not slow and not kernels and not gpu'

# the same kernels at more sizes, in Triton's interpreter, and compiled for GPUs that are not here
test-kernels: install
	$(PYTEST) $(SPREAD) -m 'kernels and not slow and not gpu'

# one test at a time: some of them compare times
test-slow: install
	$(PYTEST) -m 'slow and not gpu'

test-gpu: install
	$(PYTEST) -m gpu

# 100 random kills of trainings, grids and sessions, each compared with one that nobody killed
kill: install
	$(BIN)/python -m tests.robustness.kill --kills $(KILLS)

# hostile inputs over five seeds: each is taken, or refused by one sentence
fuzz: install
	$(BIN)/python -m tests.robustness.fuzz --inputs $(INPUTS) --seeds 5

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright -p pyproject.toml

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis

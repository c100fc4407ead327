# `make demo` and `make test` do everything on a fresh machine with Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo report test test-slow test-gpu fuzz lint clean

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
	$(BIN)/python -m pytest -n 2 -m 'not slow and not gpu'

test-slow: install
	$(BIN)/python -m pytest -m 'slow and not gpu'

test-gpu: install
	$(BIN)/python -m pytest -m gpu

fuzz: install
	$(BIN)/python -m tests.robustness.fuzz --inputs 10000 --seeds 5

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright -p pyproject.toml

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis

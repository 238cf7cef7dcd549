# Everything runs in .venv, with the versions of constraints.txt.
# On a machine with a GPU: make venv INSTALL=.[cuda]
PYTHON ?= python3
INSTALL ?= .
JOBS ?= 2
BIN := .venv/bin
PYTEST := $(BIN)/pytest -n $(JOBS) -m "not gpu"

.PHONY: venv demo test deep lint bench clean

venv: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt -e '$(INSTALL)' --group dev
	touch $@

demo: venv
	$(BIN)/python examples/train_gpt.py

test: venv
	$(PYTEST)

deep: venv
	HYPOTHESIS_PROFILE=deep $(PYTEST)

lint: venv
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python

bench: venv
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf build dist *.egg-info htmlcov .coverage* .hypothesis .*_cache
	find . -path ./.venv -prune -o -name __pycache__ -exec rm -rf {} +

# Every target is a line of commands that also work by hand.
PYTHON ?= python3
BIN := .venv/bin
TYPED := libs services tests tools bench

.PHONY: setup demo test test-slow check protos up down bench bench-core clean

setup: .venv/.installed

.venv/.installed: constraints.txt requirements/all.txt requirements/build.txt requirements/bundled.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -r requirements/build.txt
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -r requirements/all.txt
	$(BIN)/pip install -q -c constraints.txt --no-deps -r requirements/bundled.txt
	touch .venv/.installed

demo: setup
	$(BIN)/python tools/demo.py

test: setup
	$(BIN)/pytest -m "not slow and not shared_data"

test-slow: setup
	$(BIN)/pytest -m "slow and not shared_data"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/python tools/generate_protos.py --check
	$(BIN)/python tools/check_file_sizes.py

protos: setup
	$(BIN)/buf format -w protos
	$(BIN)/python tools/generate_protos.py

up: setup
	$(BIN)/specrag up

down: setup
	$(BIN)/specrag down

bench: setup
	$(BIN)/python -m bench

bench-core: setup
	$(BIN)/python -m bench.core --run

clean:
	rm -rf .venv .specrag .mypy_cache .ruff_cache .pytest_cache .hypothesis

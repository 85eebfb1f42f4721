# Two commands on a fresh machine: `make demo` and `make test`. Each sets itself up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# What to test, and options of pytest; CI adds --every-transport.
TESTS ?=

.PHONY: demo test soak lint bench clean

demo: $(STAMP)
	$(BIN)/shoal run --no-prefix -n 4 examples/train_digits.py --picture out/digits.png

test: $(STAMP)
	# One thread of torch for each worker: with two each, on two cores, they take turns. And bytecode is kept, wherever
	# it otherwise is not: a hundred processes of the tests would each compile the package again.
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -m "not soak" -n 2 $(TESTS)

soak: $(STAMP)
	$(BIN)/pytest -m soak --timeout 1800

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/shoal bench

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) out build dist

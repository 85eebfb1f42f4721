# Two commands on a fresh machine: `make demo` and `make test`. Each sets itself up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Compiled at installation, so a change of them installs anew.
NATIVE := hatch_build.py $(wildcard src/shoal/kernels/native/*.cpp src/shoal/kernels/native/*.h)
QUIET := --quiet --disable-pip-version-check

# What to test, and options of pytest; CI adds --every-transport. Each value of a parameter is tested once, but for the
# transport; TESTS=--cases=each tests each function over each transport, TESTS=--cases=all all combinations
# (tests/support/case_selection.py).
TESTS ?=
# Which marks run. `make test MARKED="not soak"` runs the slow tests, too, as .ci/run does.
MARKED ?= not soak and not slow
# The environment that the tests of frameworks and clusters have for themselves: their packages are large, and move often.
FRAMEWORKS := .venv-frameworks
RAY := tests/frameworks/test_ray.py
DOCS := .venv-docs
# Options of `shoal run` for the demo, as in: make demo DEMO="--on-failure continue"
DEMO ?=

.PHONY: demo test coverage versions frameworks clusters soak lint bench docs locked lock audit sbom clean

demo: $(STAMP)
	$(BIN)/shoal run --no-prefix -n 4 $(DEMO) examples/train_digits.py --picture out/digits.png

test: $(STAMP)
	# One thread of torch for each worker: with two each, on two cores, they take turns. And bytecode is kept, wherever
	# it otherwise is not: a hundred processes of the tests would each compile the package again. Six workers on two
	# cores: half of the time a test waits. Each begins with a sixth of the modules, whose fixtures and caches it then
	# makes alone, and takes some of another's when it has none left. (CI takes three: its tests are longer.)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -m "$(MARKED)" --cases=few -n 6 --dist worksteal $(TESTS)

# With Transformers, Accelerate and Lightning, as requirements/frameworks.lock has them; `make test` passes over these tests.
# And the programs of kernels/, which need Triton.
frameworks: $(FRAMEWORKS)/.locked
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(FRAMEWORKS)/bin/pytest -rfE tests/frameworks tests/kernels \
		--ignore $(RAY)

# Manifests against the schemas of Kubernetes, JobSet and Kubeflow, the image's file, and Ray on two nodes. Afterwards: Ray's
# nodes take long to come where others want the cores.
clusters: $(FRAMEWORKS)/.locked
	PYTHONDONTWRITEBYTECODE= $(FRAMEWORKS)/bin/pytest -rfE tests/test_kubernetes_manifests.py \
		tests/test_dockerfile.py $(RAY)

# Triton by itself: torch 2.13 asks for 3.7, whose interpreter rounds a fused multiply-add twice, as no device does.
$(FRAMEWORKS)/.locked: pyproject.toml constraints.txt requirements/frameworks.lock requirements/kernels.lock
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install $(QUIET) --no-deps --require-hashes --requirement requirements/frameworks.lock
	$(FRAMEWORKS)/bin/python -m pip install $(QUIET) --constraint constraints.txt torch
	$(FRAMEWORKS)/bin/python -m pip install $(QUIET) --no-deps --require-hashes --requirement requirements/kernels.lock
	$(FRAMEWORKS)/bin/python -m pip install $(QUIET) --no-deps --no-build-isolation --editable .
	touch $@

# Which lines of the package the tests run, also in agents and scripts: a table of its folders, and modules under 80%.
# What a process that is killed by SIGKILL has run is lost. A test that fails while each line is counted stops nothing.
coverage: $(STAMP)
	rm -rf out/coverage
	mkdir -p out/coverage
	-OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/coverage run -m pytest -m "$(MARKED)" --cases=few -n 3 --dist worksteal $(TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage json --quiet -o out/coverage/coverage.json
	$(BIN)/python tools/covered.py out/coverage/coverage.json

# The core tests with another Python or torch, in an environment of their own: make versions PYTHON=python3.13 TORCH=2.6.0
versions:
	$(PYTHON) tools/versions.py $(if $(TORCH),--torch $(TORCH)) $(VERSIONS)

soak: $(STAMP)
	$(BIN)/pytest -m soak --timeout 1800

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	cd tests && ../$(BIN)/mypy --config-file mypy.ini .

# The site, into out/site: a broken link, a missing reference or a page that is not in mkdocs.yml fails it (not with --quiet,
# which hides warnings from --strict), and so does a page of the tutorial whose code fails: each is executed before.
docs: $(DOCS)/.locked $(STAMP)
	$(BIN)/python tools/tutorial.py
	PYTHONDONTWRITEBYTECODE=1 NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.locked: requirements/docs.lock
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install $(QUIET) --no-deps --require-hashes --requirement requirements/docs.lock
	touch $@

bench: $(STAMP)
	$(BIN)/shoal bench

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUIET) --constraint constraints.txt --editable '.[dev]'
	touch $@

# As CI installs: each file as its hash says, but for torch, whose builds differ by machine (requirements/ci.in).
locked: $(VENV)/.locked

$(VENV)/.locked: pyproject.toml constraints.txt requirements/ci.lock $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUIET) --no-deps --require-hashes --requirement requirements/ci.lock
	$(BIN)/python -m pip install $(QUIET) --constraint constraints.txt torch
	$(BIN)/python -m pip install $(QUIET) --no-deps --no-build-isolation --editable .
	touch $(STAMP) $@

# Newest versions into the lock; for Python 3.11 and later, like the pins of constraints.txt.
lock:
	$(PYTHON) -m venv out/lock
	out/lock/bin/python -m pip install $(QUIET) uv
	out/lock/bin/uv pip compile pyproject.toml requirements/ci.in --extra dev --constraint constraints.txt \
		--override requirements/overrides.txt --no-emit-package torch --universal --python-version 3.11 \
		--generate-hashes --upgrade --no-header --no-annotate --quiet --output-file requirements/ci.lock
	out/lock/bin/uv pip compile pyproject.toml requirements/ci.in requirements/frameworks.in \
		--extra test --extra transformers --extra lightning --extra ray \
		--constraint constraints.txt --override requirements/overrides.txt --no-emit-package torch --universal \
		--python-version 3.11 --generate-hashes --upgrade --no-header --no-annotate --quiet \
		--output-file requirements/frameworks.lock
	echo 'triton>=3.9' | out/lock/bin/uv pip compile - --universal --python-version 3.11 --generate-hashes --upgrade \
		--no-header --no-annotate --quiet --output-file requirements/kernels.lock
	out/lock/bin/uv pip compile requirements/docs.in --universal --python-version 3.11 --generate-hashes --upgrade \
		--no-header --no-annotate --quiet --output-file requirements/docs.lock

# Known holes in what is locked, as the OSV database has them.
audit:
	$(PYTHON) tools/audit.py

# What an install brings, with versions and licences, as CycloneDX: to go with a release.
sbom: $(STAMP)
	mkdir -p out
	$(BIN)/python tools/bill.py > out/sbom.json

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(DOCS) out build dist

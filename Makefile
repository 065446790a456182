# Most targets first install what they need into .venv and compile the core; this is done once.
#
# make run     train two small models on two local workers, and compare with plain DDP
# make test    run the default tests (about six minutes on two cores)
# make test-slow  run the slow tests: two hosts, torchrun, elastic restarts, whole studies, dying ranks
# make faults  run every fault at every place, the tests that kill ranks hundreds of times and those that run thousands
#              of windows (40 minutes), and write the table of docs/reliability.md
# make test-adapters-oldest  run the adapter tests with the oldest supported releases of their libraries
# make test-isa   run some of the tests on every instruction set of this machine except the best, which `make test` uses
# make sanitize  run the op tests under AddressSanitizer and UndefinedBehaviorSanitizer, and the ops' thread pool under
#              ThreadSanitizer (needs g++; twenty minutes on two cores, most of them for compiling)
# make fuzz    search with libFuzzer for inputs that crash the ops or the loading of states: ten minutes per target, or
#              FUZZ_SECONDS=; needs Python 3.11 to 3.13. make fuzz-corpus keeps the inputs that add coverage
# make check   run ruff and mypy
# make docs    build the site into build/docs; broken links between pages are errors
# make linkcheck  check every external link of the site
# make wheel   build an sdist and a wheel from it into dist/, and test the wheel in a new environment
# make matrix  build a wheel for every installed Python from 3.10 to 3.14, and test it with torch 2.9, the newest torch
#              and versions in between, in a new environment (2 GB) each; ARGS="--pairs 3.12:2.11.0" selects some.
#              make matrix-small tests the wheel of `make wheel` with torch 2.9
# make aarch64  cross-compile the core, run every op under qemu, and compare the bits with those of this machine (needs
#              Debian's g++-aarch64-linux-gnu and qemu-user-static; three minutes)
# make test-xla  install torch_xla into a separate environment (2 GB), and run the tests on XLA replicas
# make gpu     run everything that needs a CUDA device, with PYTHON as it is, in steps of ten minutes
#              (benchmarks/gpu.py); STEP=tests selects one step, DRY=1 rehearses the steps on the CPU
# make bench   measure pyengine and its peers side by side, in a separate environment, and write docs/numbers.md and its
#              plots (an hour on two idle cores; ARGS=--short takes minutes; an interrupted run is continued).
#              make numbers only writes the pages again
# make clean   remove everything that was built or installed here
#
# Needs python3 (3.10 or newer) and a C++20 compiler. ARGS are passed on: `make run ARGS="--model cnn"`.

PYTHON ?= python3
ARGS ?=
# The number of processes that run tests; each test file runs in one process.
JOBS ?= 2
# The tests that `make wheel` runs with the installed wheel, in half a minute; WHEEL_TESTS=tests runs all.
WHEEL_TESTS ?= tests/ops/test_reference.py tests/ops/test_unscale_norm.py tests/distributed/test_step.py tests/cli/test_plan.py
# The tests that `make matrix` runs on every pair: kernels, `GradSync`, `attach`, the same bits for every world size.
# Sharded models need a newer torch:
# ARGS="--pairs 3.12:2.11.0" MATRIX_TESTS=tests/distributed/test_sharded_ends.py tests them.
MATRIX_TESTS ?= tests/ops/test_reference.py tests/ops/test_unscale_norm.py tests/ops/test_exact.py tests/distributed/test_step.py \
    tests/distributed/test_world_size.py tests/distributed/test_attach_ddp.py
# The tests that CI runs with torch 2.9, in a minute.
MATRIX_SMALL ?= tests/ops/test_reference.py tests/distributed/test_step.py tests/distributed/test_world_size.py tests/distributed/test_attach_ddp.py
# The tests that `make test-isa` runs on each set, in half a minute. PYENGINE_ISA=avx2 make test runs all tests on one.
ISA_TESTS ?= tests/distributed/test_step.py tests/distributed/test_world_size.py
# Seconds that `make fuzz` spends on each of its targets.
FUZZ_SECONDS ?= 600
FUZZ_TARGETS ?= op_boundary state_boundary
VENV := .venv
OLDEST := $(CURDIR)/build/adapters-oldest
ATHERIS := $(CURDIR)/build/atheris
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install
# The packages that compile the core, which are installed before the others.
BUILD_TOOLS := cmake ninja pybind11 setuptools
XLA_VENV := .venv-xla
BENCH_VENV := .venv-bench
XLA_INSTALLED := $(XLA_VENV)/.installed
BENCH_INSTALLED := $(BENCH_VENV)/.installed

# Empty files whose times record when each step was last done.
TOOLS := $(VENV)/.tools
INSTALLED_RUN := $(VENV)/.installed-run
INSTALLED := $(VENV)/.installed
CORE := $(VENV)/.core
CORE_CPU := $(VENV)/.core-cpu
LINKED := $(VENV)/.linked
BUILT := $(VENV)/.built
SPHINX := $(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees
DOCS_INSTALLED := $(VENV)/.docs-installed
SLOW_INSTALLED := $(VENV)/.slow-installed
# This includes folders, whose times change when a file is removed.
NATIVE := $(shell find csrc) setup.py CMakeLists.txt

.PHONY: run test matrix matrix-small faults test-slow test-adapters-oldest test-isa aarch64 sanitize sanitized-core fuzz fuzz-corpus check docs linkcheck wheel test-xla xla-env gpu bench numbers clean
.DEFAULT_GOAL := run

# The usual location of nvcc, in case it is not on PATH.
export PATH := $(PATH):/usr/local/cuda/bin
# CUDA devices, including WSL's. Without one, `run` does not compile the CUDA kernels, which take longest, unless
# PYENGINE_CUDA is set or they are compiled already.
DEVICE := $(wildcard /dev/nvidia* /dev/dxg)
CORE_RUN := $(if $(DEVICE)$(PYENGINE_CUDA)$(wildcard $(CORE)),$(CORE),$(CORE_CPU))

run:
	@$(MAKE) --no-print-directory -j2 $(CORE_RUN) $(LINKED)
	$(BIN)/python -m pyengine train $(ARGS)

test: $(BUILT)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# Files run in the order of folders, not of their number of tests: the longest tests are in small files, and the last
# folder has only short tests.
test-slow: $(BUILT) $(SLOW_INSTALLED)
	$(BIN)/python -m pytest -m "slow and not exhaustive" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

FAULTS := $(CURDIR)/build/faults.jsonl
faults: export PYENGINE_FAULTS_RESULTS := $(FAULTS)
faults: $(BUILT)
	mkdir -p build
	rm -f $(FAULTS)
	$(BIN)/python -m pytest -m "" tests/faults -n $(JOBS) --dist loadfile $(ARGS)
	$(BIN)/python -m pytest -m exhaustive tests --ignore tests/faults -n $(JOBS) --dist loadfile $(ARGS)
	$(BIN)/python tests/faults/write_table.py $(FAULTS)

# The lowest versions that pyproject.toml allows are installed in a separate folder, which precedes $(VENV) in the path.
test-adapters-oldest: $(BUILT) $(SLOW_INSTALLED)
	$(PIP) --quiet --no-deps --upgrade --target $(OLDEST) \
	    $$($(BIN)/python tests/adapters/oldest.py)
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -m "not exhaustive" tests/adapters -n $(JOBS) --dist loadfile $(ARGS)

test-isa: $(BUILT)
	set -e; for isa in $$($(BIN)/python tests/isa/forced_isa.py); do \
	    echo "PYENGINE_ISA=$$isa"; PYENGINE_ISA=$$isa $(BIN)/python -m pytest -q $(ISA_TESTS) $(ARGS); done

# Sanitized builds have separate folders (CMakePresets.json), and do not replace the installed module.
PRESET = $(BIN)/cmake --preset $(1) -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
    -Dpybind11_DIR=$$($(BIN)/python -c 'import pybind11; print(pybind11.get_cmake_dir())') \
    -DPython3_EXECUTABLE=$(CURDIR)/$(BIN)/python -DPYTHON_EXECUTABLE=$(CURDIR)/$(BIN)/python > build/$(1).log && \
    $(BIN)/cmake --build build/$(1) --target $(2)

sanitize: $(INSTALLED) sanitized-core
	$(call PRESET,sanitize-thread,pool)
	! build/sanitize-thread/pool race 2> build/race.log && grep -q "ThreadSanitizer: data race" build/race.log
	TSAN_OPTIONS=halt_on_error=1 build/sanitize-thread/pool
	PYENGINE_CORE=$$(ls $(CURDIR)/build/sanitize-address/_core*.so) tests/sanitize/sanitized.sh \
	    $(BIN)/python -m pytest -p sanitized_core tests/sanitize tests/fuzz tests/ops tests/unit/test_arena.py --ignore-glob='*cuda*' -k 'not emulated' $(ARGS)

sanitized-core: $(INSTALLED)
	mkdir -p build
	$(call PRESET,sanitize-address,_core)

# The environment and the program; libFuzzer's options and folders follow.
FUZZ = PYTHON=$(CURDIR)/$(BIN)/python PYTHONPATH=$(ATHERIS) FUZZ_TARGET=$$target \
    PYENGINE_CORE=$$(ls $(CURDIR)/build/sanitize-address/_core*.so) tests/fuzz/fuzz.sh

fuzz: sanitized-core $(ATHERIS)
	set -e; for target in $(FUZZ_TARGETS); do mkdir -p build/fuzz/$$target; $(FUZZ) -max_total_time=$(FUZZ_SECONDS) \
	    -len_control=0 -max_len=256 -rss_limit_mb=8192 -timeout=60 -artifact_prefix=build/fuzz/$$target- $(ARGS) \
	    build/fuzz/$$target tests/fuzz/corpus/$$target; done

fuzz-corpus: sanitized-core $(ATHERIS)
	set -e; for target in $(FUZZ_TARGETS); do $(FUZZ) -set_cover_merge=1 -use_counters=0 -max_len=256 -rss_limit_mb=8192 \
	    tests/fuzz/corpus/$$target build/fuzz/$$target; done

$(ATHERIS):
	$(PIP) --quiet --no-deps --target $@ atheris==3.0.0

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# The source folder is the repository, so that links are checked as they are written.
docs: $(BUILT) $(DOCS_INSTALLED)
	$(SPHINX) . build/docs

linkcheck: $(BUILT) $(DOCS_INSTALLED)
	$(SPHINX) -b linkcheck . build/linkcheck

# The wheel is built from the sdist, and tested in an environment without access to this checkout or $(VENV).
wheel: CLEAN := build/wheel/bin/python
# auditwheel computes the platform tag, the oldest glibc and libstdc++ that the symbols allow, and checks that no other
# library is needed. Wheels without the extension, or for other systems than Linux, are not retagged.
MANYLINUX = for wheel in $$(find dist -name '*-linux_*.whl'); do PATH=$(CURDIR)/$(BIN):$$PATH \
    $(BIN)/auditwheel repair --wheel-dir dist $$wheel >> build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }; rm $$wheel; done
wheel: $(INSTALLED)
	rm -rf dist build/wheel
	$(BIN)/python -m build --no-isolation > build/wheel.log || { cat build/wheel.log; exit 1; }
	$(MANYLINUX)
	$(PYTHON) -m venv build/wheel
	grep -v '^-r' requirements-dev.txt > build/pins.txt
	$(CLEAN) -m pip install --quiet --constraint requirements-run.txt --constraint build/pins.txt \
	    "$$(echo dist/*.whl)[train]" pytest hypothesis
	cd build/wheel && bin/python -c 'import pyengine, sys; assert pyengine.__file__.startswith(sys.prefix), pyengine.__file__'
	cd build/wheel && bin/python -m pyengine doctor
	cd build/wheel && bin/python -m pytest $(addprefix $(CURDIR)/,$(WHEEL_TESTS)) $(ARGS)
	ls dist

aarch64: $(BUILT)
	tests/aarch64/run.sh $(CURDIR)/$(BIN)/python $(CURDIR)/$(BIN)/cmake $(CURDIR)/$(BIN)/ninja

matrix:
	$(PYTHON) tests/matrix/matrix.py $(ARGS) $(MATRIX_TESTS)

# The environment for XLA has the oldest supported torch.
matrix-small: $(XLA_INSTALLED)
	@ls dist/*.whl > /dev/null 2>&1 || $(MAKE) wheel
	rm -rf build/matrix-small
	$(XLA_VENV)/bin/python -m pip install --quiet --no-deps --target build/matrix-small dist/*.whl
	cd build/matrix-small && PYTHONPATH=$$PWD $(CURDIR)/$(XLA_VENV)/bin/python -m pytest -q $(addprefix $(CURDIR)/,$(MATRIX_SMALL))

test-xla: $(XLA_INSTALLED)
	$(XLA_VENV)/bin/python -m pytest tests/xla -n $(JOBS) --dist loadfile $(ARGS)

xla-env: $(XLA_INSTALLED)

gpu:
	$(PYTHON) benchmarks/gpu.py $(STEP) $(if $(DRY),--dry) $(ARGS)

# Shaped links and byte counts need root; without it, these parts are left out with a message.
bench: $(BENCH_INSTALLED)
	$(BENCH_VENV)/bin/python benchmarks/bench_peers.py $(ARGS); ended=$$?; \
	    $(BENCH_VENV)/bin/python benchmarks/render_numbers.py && exit $$ended

numbers: $(BENCH_INSTALLED)
	$(BENCH_VENV)/bin/python benchmarks/render_numbers.py
	$(BENCH_VENV)/bin/python benchmarks/render_study.py

# An environment on top of $(VENV): a .pth file adds the packages of $(VENV), and the others are installed here.
$(BENCH_INSTALLED): $(BUILT) benchmarks/requirements.txt
	$(BIN)/python -m venv $(BENCH_VENV)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	    > $$($(BENCH_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_venv.pth
	$(BENCH_VENV)/bin/python -m pip install --quiet -r benchmarks/requirements.txt
	touch $@

# The core does not link torch, so `run` compiles it while torch is being installed. Progress bars need a terminal.
QUIET := $(if $(MAKE_TERMOUT),,--quiet)

$(TOOLS): requirements-run.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}, expected 3.10 or newer: make PYTHON=/path/to/python3.x")'
	@echo "Creating $(VENV) for pyengine train: first the tools that compile the core (40 MB)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --quiet $$(grep -E "^($$(echo $(BUILD_TOOLS) | tr ' ' '|'))==" requirements-run.txt)
	touch $@

$(INSTALLED_RUN): $(TOOLS)
	@echo "Installing torch (200 MB for the CPU, 3 GB for PyPI's CUDA build), NumPy, Rich and scikit-learn"
	$(PIP) $(QUIET) -r requirements-run.txt
	touch $@

$(INSTALLED): $(INSTALLED_RUN) requirements-dev.txt
	@echo "Installing the other packages that tests and checks need (1 GB)"
	$(PIP) $(QUIET) -r requirements-dev.txt
	touch $@

COMPILE = $(BIN)/python setup.py --quiet build_ext --inplace > $@.log 2>&1 || { cat $@.log; exit 1; }

NO_NVCC := NOTE: found a CUDA device but no nvcc: THE CORE WILL HAVE NO CUDA KERNELS. To compile them, put nvcc \
    (12.8 or newer) on PATH or set CUDACXX, then: rm $(CORE) && make

$(CORE): $(TOOLS) $(NATIVE)
	@echo "Compiling the core, with CUDA kernels if nvcc is installed (minutes)"
	@[ -z "$(DEVICE)$(CUDACXX)" ] || command -v $${CUDACXX:-nvcc} > /dev/null || echo "$(NO_NVCC)"
	@$(COMPILE)
	touch $@

$(CORE_CPU): $(TOOLS) $(NATIVE)
	@echo "Compiling the core for this CPU (a minute), because no CUDA device was found (PYENGINE_CUDA=1 make run adds CUDA)"
	@PYENGINE_CUDA=0 PYENGINE_NATIVE=1 $(COMPILE)
	touch $@

# The core has already been compiled in place.
$(LINKED): $(INSTALLED_RUN) pyproject.toml setup.py
	PYENGINE_NO_EXT=1 $(PIP) --quiet --no-build-isolation --no-deps -e .
	touch $@

$(BUILT): $(INSTALLED) $(CORE) $(LINKED)
	touch $@

$(XLA_INSTALLED): tests/xla/make_env.sh tests/matrix/make_env.sh tests/matrix/cuda_stubs.py tests/xla/requirements.txt
	tests/xla/make_env.sh $(XLA_VENV) $(PYTHON)
	touch $@

$(SLOW_INSTALLED): $(INSTALLED) requirements-slow.txt
	$(PIP) --quiet -r requirements-slow.txt
	touch $@

$(DOCS_INSTALLED): $(INSTALLED) requirements-docs.txt
	$(PIP) --quiet -r requirements-docs.txt
	touch $@

clean:
	rm -rf $(VENV) $(XLA_VENV) $(BENCH_VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find pyengine -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

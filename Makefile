# make run     set up (torch, three more packages and the core), then train two small models on two local workers and
#              compare with plain DDP
# make test    set up with what tests need, too, then run the tests (about six minutes on two cores)
# make test-slow  set up, then run those that take long: two hosts, torchrun, elastic restarts, whole studies, dying ranks
# make faults  set up, then run every fault at every place, what is killed hundreds of times and what runs for
#              thousands of windows (40 minutes), and write the table of docs/reliability.md
# make test-adapters-oldest  set up, then run the tests of the adapters on the oldest releases of their libraries
# make test-isa   set up, then run a choice of the tests on every instruction set that this machine has but its best,
#              which is that of `make test`
# make sanitize  set up, then run the op tests under AddressSanitizer and UndefinedBehaviorSanitizer, and the ops on
#              their own threads under ThreadSanitizer (g++; twenty minutes on two cores, most of them compiling)
# make fuzz    set up, then let libFuzzer look for inputs that ops and states do not survive: ten minutes each, or
#              FUZZ_SECONDS=; on Python 3.11 to 3.13. make fuzz-corpus keeps of what it found the few that reach most
# make check   set up, then ruff and mypy
# make docs    set up, then build the site into build/docs; a broken link between pages fails
# make linkcheck  set up, then ask the network for every link that leads out of the site
# make wheel   set up, then build sdist and, from it, a wheel into dist/, and test that in an environment of its own
# make matrix  build a wheel for every Python from 3.10 to 3.14 that is here, and test it on torch 2.9, the newest and
#              between, an environment (2 GB) after the other; ARGS="--pairs 3.12:2.11.0" chooses. make matrix-small
#              tests the wheel of `make wheel` on torch 2.9
# make aarch64  cross-compile the core, run every op under qemu, and compare bits with this machine's (needs Debian's
#              g++-aarch64-linux-gnu and qemu-user-static; three minutes)
# make test-xla  set up torch_xla in an environment of its own (2 GB), then run the tests on XLA replicas
# make gpu     on a machine with a CUDA device, with PYTHON as it is: all it is needed for, in steps of ten minutes
#              (benchmarks/gpu.py); STEP=tests is one of them, DRY=1 rehearses them on the processor
# make bench   set up, with the peers in an environment of their own, then measure what a user would take instead,
#              side by side, and write docs/numbers.md and its plots (an hour on two quiet cores;
#              ARGS=--short is minutes; goes on where it was stopped); make numbers only writes the pages anew
# make clean   remove everything that was built or installed here
#
# Needs python3 (3.10 or newer) and a C++20 compiler. `make run ARGS="--model cnn"` passes arguments on.

PYTHON ?= python3
ARGS ?=
# Processes that share the tests out, file by file.
JOBS ?= 2
# What `make wheel` runs against the installed wheel: half a minute's choice; WHEEL_TESTS=tests is all.
WHEEL_TESTS ?= tests/ops/test_reference.py tests/ops/test_unscale_norm.py tests/distributed/test_step.py tests/cli/test_plan.py
# What `make matrix` runs on every pair: kernels, `GradSync`, `attach`, the same bits for every world size. Sharded
# models need torch 2.11 and refuse an older one by name:
# ARGS="--pairs 3.12:2.11.0" MATRIX_TESTS=tests/distributed/test_sharded_ends.py tests them.
MATRIX_TESTS ?= tests/ops/test_reference.py tests/ops/test_unscale_norm.py tests/ops/test_exact.py tests/distributed/test_step.py \
    tests/distributed/test_world_size.py tests/distributed/test_attach_ddp.py
# What CI runs on torch 2.9, in a minute.
MATRIX_SMALL ?= tests/ops/test_reference.py tests/distributed/test_step.py tests/distributed/test_world_size.py tests/distributed/test_attach_ddp.py
# What `make test-isa` runs on each: half a minute. PYENGINE_ISA=avx2 make test runs everything on one.
ISA_TESTS ?= tests/distributed/test_step.py tests/distributed/test_world_size.py
# How long `make fuzz` takes for each of its targets.
FUZZ_SECONDS ?= 600
FUZZ_TARGETS ?= op_boundary state_boundary
VENV := .venv
OLDEST := $(CURDIR)/build/adapters-oldest
ATHERIS := $(CURDIR)/build/atheris
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install
# What compiles the core, and needs to be there before the rest.
BUILD_TOOLS := cmake ninja pybind11 setuptools
XLA_VENV := .venv-xla
BENCH_VENV := .venv-bench
XLA_INSTALLED := $(XLA_VENV)/.installed
BENCH_INSTALLED := $(BENCH_VENV)/.installed

# Empty files: when each was last done. What stands behind them decides whether it is done again.
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
# Folders too: their time changes when a file is removed.
NATIVE := $(shell find csrc) setup.py CMakeLists.txt

.PHONY: run test matrix matrix-small faults test-slow test-adapters-oldest test-isa aarch64 sanitize sanitized-core fuzz fuzz-corpus check docs linkcheck wheel test-xla xla-env gpu bench numbers clean
.DEFAULT_GOAL := run

# Where CUDA puts nvcc, for who has not put it on PATH.
export PATH := $(PATH):/usr/local/cuda/bin
# A CUDA device, also WSL's. Without one `run` leaves the CUDA kernels out, which take longest to compile, unless
# PYENGINE_CUDA asks for them or they are there already.
DEVICE := $(wildcard /dev/nvidia* /dev/dxg)
CORE_RUN := $(if $(DEVICE)$(PYENGINE_CUDA)$(wildcard $(CORE)),$(CORE),$(CORE_CPU))

run:
	@$(MAKE) --no-print-directory -j2 $(CORE_RUN) $(LINKED)
	$(BIN)/python -m pyengine train $(ARGS)

test: $(BUILT)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# In the order of folders, whose last has short tests alone: most of those that take long have a small file.
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

# The lower ends of the ranges in pyproject.toml, in a folder of their own, before those of $(VENV).
test-adapters-oldest: $(BUILT) $(SLOW_INSTALLED)
	$(PIP) --quiet --no-deps --upgrade --target $(OLDEST) \
	    $$($(BIN)/python tests/adapters/oldest.py)
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -m "not exhaustive" tests/adapters -n $(JOBS) --dist loadfile $(ARGS)

test-isa: $(BUILT)
	set -e; for isa in $$($(BIN)/python tests/isa/forced_isa.py); do \
	    echo "PYENGINE_ISA=$$isa"; PYENGINE_ISA=$$isa $(BIN)/python -m pytest -q $(ISA_TESTS) $(ARGS); done

# Sanitized builds have folders of their own (CMakePresets.json); the module that is installed stays as it is.
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

# FUZZ_TARGET and the environment of libFuzzer, then its options and folders.
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

# The source folder is this one, so that links are checked as they are written.
docs: $(BUILT) $(DOCS_INSTALLED)
	$(SPHINX) . build/docs

linkcheck: $(BUILT) $(DOCS_INSTALLED)
	$(SPHINX) -b linkcheck . build/linkcheck

# The wheel is built from the sdist, and its environment is its own: nothing of this checkout or of $(VENV) is in reach.
wheel: CLEAN := build/wheel/bin/python
# The tag says the oldest glibc and libstdc++ that will do, as the symbols tell, and that nothing else has to be there.
# Without the extension, and elsewhere than on Linux, there is nothing to tag.
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

# The environment for XLA has the oldest torch.
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

# Root makes hosts of its own for links and bytes; without it those parts are left out, and say so.
bench: $(BENCH_INSTALLED)
	$(BENCH_VENV)/bin/python benchmarks/bench_peers.py $(ARGS); ended=$$?; \
	    $(BENCH_VENV)/bin/python benchmarks/render_numbers.py && exit $$ended

numbers: $(BENCH_INSTALLED)
	$(BENCH_VENV)/bin/python benchmarks/render_numbers.py
	$(BENCH_VENV)/bin/python benchmarks/render_study.py

# An environment over $(VENV): what that has is seen through a .pth file, what it lacks is installed here.
$(BENCH_INSTALLED): $(BUILT) benchmarks/requirements.txt
	$(BIN)/python -m venv $(BENCH_VENV)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	    > $$($(BENCH_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_venv.pth
	$(BENCH_VENV)/bin/python -m pip install --quiet -r benchmarks/requirements.txt
	touch $@

# The core links no torch: `run` lets it compile while torch is on its way. Progress bars are for a terminal.
QUIET := $(if $(MAKE_TERMOUT),,--quiet)

$(TOOLS): requirements-run.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}, need 3.10 or newer: make PYTHON=/path/to/python3.x")'
	@echo "Making $(VENV) with what train needs: first what compiles the core (40 MB)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --quiet $$(grep -E "^($$(echo $(BUILD_TOOLS) | tr ' ' '|'))==" requirements-run.txt)
	touch $@

$(INSTALLED_RUN): $(TOOLS)
	@echo "Installing torch (200 MB for the CPU, 3 GB where PyPI's build for CUDA is taken), NumPy, Rich and scikit-learn"
	$(PIP) $(QUIET) -r requirements-run.txt
	touch $@

$(INSTALLED): $(INSTALLED_RUN) requirements-dev.txt
	@echo "Installing what tests and checks need beside those (1 GB)"
	$(PIP) $(QUIET) -r requirements-dev.txt
	touch $@

COMPILE = $(BIN)/python setup.py --quiet build_ext --inplace > $@.log 2>&1 || { cat $@.log; exit 1; }

NO_NVCC := NOTE: a CUDA device, but no nvcc: THE CORE GETS NO CUDA KERNELS. To have them, put nvcc (12.8 or newer) \
    on PATH or set CUDACXX, then: rm $(CORE) && make

$(CORE): $(TOOLS) $(NATIVE)
	@echo "Compiling the core, with CUDA kernels if there is nvcc (minutes)"
	@[ -z "$(DEVICE)$(CUDACXX)" ] || command -v $${CUDACXX:-nvcc} > /dev/null || echo "$(NO_NVCC)"
	@$(COMPILE)
	touch $@

$(CORE_CPU): $(TOOLS) $(NATIVE)
	@echo "Compiling the core (a minute), for this CPU: there is no CUDA device here (PYENGINE_CUDA=1 make run: for CUDA too)"
	@PYENGINE_CUDA=0 PYENGINE_NATIVE=1 $(COMPILE)
	touch $@

# The core lies beside its modules already.
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

# make demo    a real model answers a question with and without a packed cache (sets everything up on the first call)
# make test    the tests, on the newest transformers and on the oldest supported one; not the long ones
# make test-all  make test, then the long ones: the whole matrix of formats, accuracy against its bands, the oldest Triton's compiler, Ray;
#                all with fresh random data (TEST_SEED=random), the last line of a run shows how to repeat it
# make notebooks  every notebook, from top to bottom
# make measure  adds what the accuracy records do not hold yet (about an hour from nothing)
# make results  renders docs/results.md, its excerpts and docs/benchmarks.md from the records, in seconds
# make docs    the site of these pages, into build/docs
# make release  builds the wheel and the source distribution into dist/, and checks both; uploads nothing
# make lint    ruff, mypy, and clang-format of the CUDA sources
# make gpu-test  the tests that need a GPU, a case for each path of the kernels
# make gpu-test-all  all of them, the whole matrix of formats
# make bench   the measurements of speed in README and docs, on a GPU (two hours); `eval/benchmarks/bench.sh` has each of them
# make clean   removes what these made
#
# PYTHON  the interpreter to build the environment from: 3.11 or later
# TORCH   the torch to install. By default the version the project is tested with; on a machine without a GPU, point pip
#         at torch's CPU builds (PIP_FIND_LINKS or PIP_INDEX_URL) to save several GB. E.g. make test TORCH="torch"

PYTHON ?= python3
TORCH ?= $(if $(shell command -v nvidia-smi),torch,torch==2.13.0)
OLDEST_TRANSFORMERS := 5.17.0
OLDEST_TRITON := 3.6.0

VENV := .venv
BIN := $(VENV)/bin
OLDEST := $(VENV)/transformers-$(OLDEST_TRANSFORMERS)
QUANTIZED := $(VENV)/quantized-weights
TRITON := $(VENV)/triton-$(OLDEST_TRITON)
RAY := $(VENV)/ray
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
# neighbours of a file stay in one process, which shares what it made; a process that has nothing left takes tests from another
PYTEST_ALL_CORES := OMP_NUM_THREADS=1 $(PYTEST) -n auto --dist worksteal
# the files with tests for both ends of the range of transformers
HOST = $(shell grep -rlE --include="test_*.py" "mark\.host\b" tests)
# the files with tests for a GPU: collecting all others takes each process longer
GPU = $(sort $(shell grep -rlE --include="test_*.py" "mark\.gpu\b" tests))

.PHONY: calibrations demo docs release test test-newest test-oldest test-quantized test-all notebooks gpu-test gpu-test-all bench measure results lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.ready
	$(BIN)/hf-lowbit-kv demo

# tests without the mark gpu run as on a machine without a GPU
test test-newest test-oldest test-quantized test-all notebooks: export CUDA_VISIBLE_DEVICES =
# three passes side by side, so that no core waits for the end of another pass
test: $(VENV)/.ready
	@$(MAKE) --no-print-directory -j3 test-newest test-oldest test-quantized

test-newest: $(VENV)/.ready
	$(PYTEST_ALL_CORES) -m "not gpu and not slow and not notebook"

# what a pass writes, when it has ended: beside another one it could not be read
AT_THE_END = > build/$@.txt 2>&1; status=$$?; cat build/$@.txt; exit $$status

test-oldest: $(OLDEST)/.ready
	@mkdir -p build
	PYTHONPATH=$(CURDIR)/$(OLDEST) $(BIN)/python -c 'import transformers; print("Again, on transformers", transformers.__version__); assert transformers.__version__ == "$(OLDEST_TRANSFORMERS)"'
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(OLDEST) $(PYTEST) -m "host and not gpu and not slow and not newest" $(HOST) $(AT_THE_END)

test-quantized: $(QUANTIZED)/.ready
	@mkdir -p build
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(QUANTIZED) $(PYTEST) tests/generation/test_weights_below_16_bits.py $(AT_THE_END)

test-all: export TEST_SEED ?= random
test-all: test $(TRITON)/.ready $(RAY)/.ready
	$(PYTEST_ALL_CORES) -m "slow and not gpu and not notebook"
	PYTHONPATH=$(CURDIR)/$(OLDEST) $(PYTEST_ALL_CORES) -m "host and not gpu" $(HOST)
	PYTHONPATH=$(CURDIR)/$(TRITON) $(BIN)/python -c 'import triton; print("Again, on Triton", triton.__version__); assert triton.__version__ == "$(OLDEST_TRITON)"'
	PYTHONPATH=$(CURDIR)/$(TRITON) $(PYTEST_ALL_CORES) tests/triton/test_triton_compiles.py
	PYTHONPATH=$(CURDIR)/$(RAY) $(PYTEST) tests/requests/test_ray.py

notebooks: $(VENV)/.ready
	$(PYTEST_ALL_CORES) -m notebook

# each process compiles by itself: inductor's own processes, some for each of these, would only wait for each other
gpu-test gpu-test-all: export TORCHINDUCTOR_COMPILE_THREADS = 1
gpu-test: $(VENV)/.ready
	$(PYTEST_ALL_CORES) -p as_they_end -m "gpu and not slow" $(GPU)

gpu-test-all: $(VENV)/.ready
	$(PYTEST_ALL_CORES) -p as_they_end -m gpu $(GPU)

bench: $(VENV)/.ready
	PYTHON=$(BIN)/python sh eval/benchmarks/bench.sh

measure: $(VENV)/.ready
	$(BIN)/python -m hf_lowbit_kv.eval.benchmarks.measure

results: $(VENV)/.ready
	$(BIN)/python -m hf_lowbit_kv.eval.benchmarks.tables

docs: $(VENV)/.ready
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@! grep -rn --include='*.html' '<span class="xref myst"></span>' build/docs || { echo "links without a text"; exit 1; }
	@echo "build/docs/index.html"

# the wheel is built from the source distribution, so nothing of the checkout can slip in; without isolation: offline
release: $(VENV)/.ready
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --no-index --target build/release dist/*.whl
	cd build/release && PYTHONPATH=. ../../$(BIN)/python -c 'import hf_lowbit_kv as lb; print(lb.__file__, len(lb.preset_names()), "presets")'
	rm -rf build/release

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror triton_kernels/cuda/*.cu triton_kernels/cuda/*.cuh
	$(BIN)/mypy

# the bundled model's codebooks (10 minutes on two cores), and what eigen-* need (7)
calibrations: $(VENV)/.ready
	$(BIN)/hf-lowbit-kv calibrate --device cpu --dtype float32 --samples 64 -p vecinfer-4,vecinfer-2,vecinfer-1.5,vecinfer-1.25 \
		-o hf_lowbit_kv/bundled/SmolLM2-135M-Instruct.safetensors
	$(BIN)/hf-lowbit-kv calibrate --device cpu --dtype float32 -p eigen-2,eigen-3,eigen-4 \
		$$($(BIN)/python -c "from hf_lowbit_kv.eval.local_models import *; print(*(f'--text {x}' for x in varied_texts()))") \
		-o hf_lowbit_kv/bundled/SmolLM2-135M-Instruct-eigen.safetensors

clean:
	rm -rf $(VENV) build dist bench-logs *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first, separately and pinned: as a dependency of something else pip could choose another build of it
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing $(TORCH) (a minute or more)"
	$(PIP) "$(TORCH)"
	@touch $@

# the packages without dependencies bring a model, texts and questions; the code in them, and what it needs, is not used
$(VENV)/.ready: $(VENV)/.torch pyproject.toml hf_lowbit_kv/installation.py
	@echo "Installing the project"
	$(PIP) --editable ".[calibrate,eval,serve,notebooks,docs,dev]"
	$(PIP) --no-deps $$($(BIN)/python -c "from hf_lowbit_kv.installation import DATA; print(*DATA.values())")
	@touch $@

$(OLDEST)/.ready: $(VENV)/.ready
	rm -rf $(OLDEST)
	$(PIP) --target $(OLDEST) transformers==$(OLDEST_TRANSFORMERS)
	@touch $@

# beside the environment, not in it: torchao writes to standard error wherever transformers looks for it
$(QUANTIZED)/.ready: $(VENV)/.ready
	rm -rf $(QUANTIZED)
	$(PIP) --no-deps --target $(QUANTIZED) torchao==0.18.0 bitsandbytes==0.50.2
	@touch $@

$(TRITON)/.ready: $(VENV)/.ready
	rm -rf $(TRITON)
	$(PIP) --no-deps --target $(TRITON) triton==$(OLDEST_TRITON)
	@touch $@

# what else Ray needs is there; with its dependencies, the folder would hide packages of the environment
$(RAY)/.ready: $(VENV)/.ready
	rm -rf $(RAY)
	$(PIP) --no-deps --target $(RAY) "ray[data]==2.60.0" msgpack==1.2.4 protobuf==7.36.2
	@touch $@

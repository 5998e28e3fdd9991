# Everything a developer runs, from a fresh clone: `make test`, `make demo`, `make lint`, `make bench`,
# `make test-clients` (the tests with frameworks that use the package) and `make docs` (the API page).
#
# The first target that needs the package installs it, editable, into the active virtual environment or
# into .venv; Python edits are then seen at once, and an edit in csrc/ rebuilds the kernels at the next
# make. Options go through ARGS: make demo ARGS="--steps 20", make test ARGS="-k router".
#
#   PYTHON     an interpreter to install into instead
#   TORCH      what to install where torch is missing; a bare "torch" takes a CUDA build of several GB
#   PIP_FLAGS  for pip install, such as "--no-build-isolation --no-deps" on a machine without a network, which
#              then has scikit-build-core, cmake, ninja and an nvcc already

TORCH ?= torch==2.13.0

ifdef PYTHON
INSTALLED := build/installed-$(subst /,_,$(PYTHON))
else
VENV := $(or $(VIRTUAL_ENV),.venv)
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/cake_ops-installed
export PATH := $(abspath $(VENV))/bin:$(PATH)

$(INSTALLED): | $(PYTHON)
$(PYTHON):
	python3 -m venv $(VENV)
endif

CUDA_SOURCES := $(wildcard csrc/kernels/*.cu csrc/include/cake/*.cuh)

.DEFAULT_GOAL := test
.PHONY: test test-clients demo bench docs lint format install clean

test: $(INSTALLED)
	$(PYTHON) -m pytest $(ARGS)

# torchtitan, kernels and lightning ask for much that their layers and loops do not need, hence --no-deps.
# torchtitan imports triton, which a CPU build of torch does not bring.
test-clients: $(INSTALLED)
	$(PYTHON) -m pip install --quiet "transformers==5.24.*" tyro
	$(PYTHON) -m pip install --quiet --no-deps torchtitan==0.3.0 spmd_types==0.2.3 \
		kernels==0.17.2 lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0
	$(PYTHON) -c "import triton" 2>/dev/null || $(PYTHON) -m pip install --quiet --no-deps triton
	$(PYTHON) -m pytest -m client $(ARGS)

demo: $(INSTALLED)
	$(PYTHON) -m cake_ops.demo $(ARGS)

bench: $(INSTALLED)
	$(PYTHON) -m cake_ops.bench host $(ARGS)

docs: # reads the sources and imports nothing, so nothing has to be installed
	python3 docs/generate_api.py

lint: $(INSTALLED)
	ruff check
	ruff format --check
	clang-format --dry-run -Werror $(CUDA_SOURCES)

format: $(INSTALLED)
	ruff check --fix
	ruff format
	clang-format -i $(CUDA_SOURCES)

install: $(INSTALLED)

$(INSTALLED): pyproject.toml CMakeLists.txt csrc/instances.cmake csrc/compile.py $(CUDA_SOURCES)
	$(PYTHON) -c "import torch" 2>/dev/null || $(PYTHON) -m pip install $(TORCH)
	$(PYTHON) -m pip install $(PIP_FLAGS) -e ".[test,demo,dev]"
	@mkdir -p $(@D)
	@touch $@

clean:
	rm -rf build dist .pytest_cache .ruff_cache $(INSTALLED)
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +

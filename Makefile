# Everything CI does is a target here. Variables that may be given: PYTHON (3.11 or newer), VENV, ARGS (for pytest; "-n 0": one test
# at a time), TORCH_INDEX (for example https://download.pytorch.org/whl/cpu: the build without CUDA).

PYTHON ?= python3
VENV ?= .venv
BIN = $(abspath $(VENV))/bin
# One environment, made in stages: what the demo needs, for which a newcomer waits, the rest, and DeepSpeed's C++ parts.
DEMO = $(VENV)/.demo-is-up-to-date
STAMP = $(VENV)/.up-to-date
OPS = $(TORCH_EXTENSIONS_DIR)/.up-to-date
TREE = build/tree
PACKAGES = build/packages
# Not the whole suite a second time: what packaging could break. tests/project/test_packaging.py is about the checkout.
WHEEL_TESTS = tests/project/test_imports.py tests/core/test_layout.py tests/core/test_placement.py tests/project/test_readme.py tests/project/test_wheel_journeys.py
# A test that its timeout cannot end, since its cleaning up waits for a lock, ends its process with all stacks; longer than any test's own.
HANGING = -o faulthandler_timeout=1300 -o faulthandler_exit_on_timeout=true
# DeepSpeed compiles what it needs of C++ at first use, here before the tests: a process that is killed meanwhile would leave a lock.
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions
# Thousands of test processes would compile the package again.
export PYTHONDONTWRITEBYTECODE =
PIP_INSTALL = $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: help venv ops test compat gpu gpu-kit soak test-slurm chaos evidence demo lint format types imports wheel wheel-test site check clean
.DEFAULT_GOAL := help

help: ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(STAMP) ## the environment; nothing happens while it is up to date

$(DEMO): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) pip setuptools
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP_INSTALL) --no-build-isolation --editable '.[lightning]'
	@touch $@

$(STAMP): $(DEMO)
	$(PIP_INSTALL) --no-build-isolation --editable '.[lightning,deepspeed,huggingface,s3,dev,docs]'
	@touch $@

ops: $(OPS) ## DeepSpeed's C++ parts, compiled once for a machine (~/.cache/gemini-ft) and not once for a clone

$(OPS): $(STAMP)
	@PATH=$(BIN):$$PATH $(BIN)/python scripts/build_deepspeed_ops
	@touch $@

test: $(OPS) ## all tests except the long ones
	$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(HANGING) --durations 40 --durations-min 5 $(ARGS)

soak: $(if $(PART)$(ARGS),$(OPS)) ## the long tests: which parts there are; PART=chaos-1: one of them
	@$(if $(PART)$(ARGS),$(BIN)/python,$(PYTHON)) scripts/soak $(addprefix --part ,$(PART)) $(ARGS)

test-slurm: $(STAMP) ## jobs on a real SLURM (apt-get install slurmctld slurmd slurm-client munge); part of soak
	$(BIN)/python -m pytest -m slurm -n 0 $(ARGS)

chaos: $(OPS) ## random failures on real processes; ARGS=--quick: under two minutes
	$(BIN)/python benchmarks/chaos.py $(ARGS)

compat: ## TORCH=2.15.0 PYTHON=python3.13 ...: the compatibility part in an environment of its own (docs/versions.md)
	scripts/compat --python $(PYTHON) $(foreach each,TORCH LIGHTNING DEEPSPEED TRANSFORMERS,$(if $($(each)),--$(shell echo $(each) | tr A-Z a-z) $($(each)))) -- $(ARGS)

gpu: ## what only a GPU can show, in under ten minutes, with the machine's own torch (PYTHON); GEMINI_FAKE_GPU=1: on a CPU
	$(PYTHON) benchmarks/gpu/run.py $(ARGS)

gpu-kit: $(STAMP) ## the wheels that a GPU machine without network lacks, into build/gpu-kit
	$(BIN)/python scripts/gpu_kit $(ARGS)

evidence: $(OPS) ## quick campaigns, and a bundle of their results, build/evidence; scripts/gemini-evidence verify checks it
	rm -rf build/evidence && mkdir -p build
	$(BIN)/python scripts/gemini-evidence run $(ARGS) build/evidence

demo: $(DEMO) ## a training job is killed three ways and ends with the same bits; ARGS="--svg docs/demo.svg" draws it
	$(BIN)/python examples/survive_failures.py $(ARGS)

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# sync/ and compression/ as they lie in an installed package, so that tools which know nothing of the mapping see
# gemini_ft.sync and gemini_ft.compression. The files are links: messages name lines of the checkout.
$(TREE): FORCE
	@rm -rf $@ && mkdir -p $@
	@cp -rs $(CURDIR)/gemini_ft $@/
	@cp -rs $(CURDIR)/sync $(CURDIR)/compression $@/gemini_ft/
FORCE:

# For tools that see no folder without an __init__.py. Not in the same place: checks run side by side.
$(PACKAGES): $(TREE)
	@rm -rf $@ && cp -a $(TREE) $@
	@touch $@/gemini_ft/sync/__init__.py $@/gemini_ft/compression/__init__.py

# The package, what the tests share (kits, servers, the model of the protocol), and the benchmarks, which no test runs.
MYPY = $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache
KIT = $(addprefix $(CURDIR)/tests/,conftest.py kit/*.py kit/miniature/*.py kit/parity/*.py kit/simulation/*.py)
BENCHMARKS = $(addprefix $(CURDIR)/benchmarks/,*.py peers/*.py gpu/*.py)

types: $(STAMP) $(TREE) ## mypy --strict
	cd $(TREE) && $(MYPY) -p gemini_ft
	cd $(TREE) && MYPYPATH=$(CURDIR)/tests/kit $(MYPY) $(KIT)
	cd $(TREE) && MYPYPATH=$(CURDIR)/tests/kit:$(CURDIR)/benchmarks $(MYPY) --allow-untyped-calls --no-warn-return-any --no-warn-unused-ignores $(BENCHMARKS)

imports: $(STAMP) $(PACKAGES) ## which module may import which
	cd $(PACKAGES) && $(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --no-cache

wheel: $(STAMP) ## build the wheel into dist/
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

wheel-test: wheel $(OPS) ## tests against the built wheel, the checkout's code out of reach
	scripts/test_wheel $(BIN)/python dist/*.whl $(or $(ARGS),$(WHEEL_TESTS))

site: $(STAMP) $(PACKAGES) ## the documentation site, strictly, into build/site
	scripts/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict --clean

check: lint types imports test wheel-test site ## everything

clean: ## what can be built again; the environment stays
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

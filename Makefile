# Each target does its own set-up; nothing needs to be installed before.
.DEFAULT_GOAL := help
.PHONY: help install demo train test unit newest gpu soak check docs bench clean
BIN := .venv/bin
# Two processes share two cores on a small machine; torch must not spin on both.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

help: ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: ## Make .venv with everything in it
	@scripts/install

demo: install ## Roll out a real model on real tasks and write runs/demo.jsonl
	@mkdir -p runs
	@$(BIN)/gymrl rollout chain_sum --model smollm2 --num-prompts 8 --num-generations 4 \
		--max-output-tokens 24 --temperature 0.7 --seed 1 \
		--output runs/demo.jsonl --overwrite

train: install ## Teach a tiny model to say words (TASK=look_up: to ask a tool), and draw its rewards
	@$(BIN)/torchrun --standalone --nproc-per-node 2 -m gymrl.recipes.grpo --live \
		$(if $(TASK),--task $(TASK),--set output=runs/train)

test: install ## Run all tests
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

unit: install ## Run the unit tests alone (under a minute)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest tests/unit $(PYTEST_ARGS) # compiling them anew takes seconds

newest: ## Run what touches models beside the newest packages, which vLLM for CPUs does not allow
	@GYMRL_VENV=.venv-newest GYMRL_VLLM=no scripts/install
	@.venv-newest/bin/python -m pytest $(PYTEST_ARGS) tests/unit/generation tests/integration/generation \
		tests/integration/native/test_images.py tests/integration/compat/test_native_images.py

gpu: ## Run the tests that need GPUs, beside vLLM for GPUs
	@GYMRL_VENV=.venv-gpu GYMRL_VLLM=gpu scripts/install
	@GYMRL_GPU=1 .venv-gpu/bin/python -m pytest tests/gpu $(PYTEST_ARGS)

soak: install ## Minutes of faults in the actors; figures as one line of JSON
	@$(BIN)/python -m tests.soak $(SOAK_ARGS)

check: install ## Format, lint, types, import arrows, spelling, docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell gymrl tests benchmarks docs scripts README.md CHANGELOG.md
	$(MAKE) --no-print-directory docs

docs: install ## Build the documentation into docs/_build/html, warnings as errors
	$(BIN)/sphinx-build -n -W --keep-going -q -b html docs docs/_build/html

bench: install ## Run the benchmarks beside Ray and xoscar; results as JSON in benchmarks/results
	@scripts/bench-peers
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean: ## Remove what builds and checks leave behind
	rm -rf docs/_build build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

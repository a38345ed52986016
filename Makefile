# `make help` lists the targets.

# --- what to serve; each can be given on the command line ---------------------------------------
PORT  ?= 30000
MODEL ?= checkpoints/tiny/target
DRAFT ?= checkpoints/tiny/drafter
ARGS  ?=
# What `make losslessness` compares them on, and its options; they come after those for the bundled pair and win.
PROMPTS ?= checkpoints/tiny/data/openings.jsonl
COMPARE ?=
# Processes of `make test`, each of which starts servers of its own.
JOBS ?= 3
# Options of `make sweep`; they come after those for the bundled pair and win.
SWEEP ?=
# Where `make tiny-pair` puts the pair, and options of its trainer.
OUT   ?= checkpoints/tiny
TRAIN ?=
# The release that `make rebase` tries.
TO    ?=
# Options of `make serving`, likewise.
SERVING ?=
# Where `make wheels` writes them.
DIST  ?= dist

# --- where and with what ------------------------------------------------------------------------
BUILD ?= build
VENV  ?= .venv
DEV   ?=
PYTHON ?= $(shell for p in python3.12 python3.11 python3 python; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
	2>/dev/null && echo $$p && break; done)
ACCEL ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)

# --- server arguments by machine; ARGS come after them and win ----------------------------------
SERVER_cpu  = --device cpu --attention-backend torch_native --dtype float32 \
	--max-total-tokens 16384 --max-running-requests 16 --sleep-on-idle
SERVER_cuda =
# What a CPU can serve is so small that more threads than one wait for each other.
ENV_cpu     = SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}
# flashinfer-cubin, prebuilt kernels that a Hopper GPU does not need, is not in the lock.
ENV_cuda    = FLASHINFER_DISABLE_VERSION_CHECK=1
# The bundled pair knows its own problems, and 4,096 positions.
SWEEP_tiny  = --dataset-path checkpoints/tiny/data/test.jsonl --max-new-tokens 512 --tp-sizes 1 \
	--concurrencies 1,8 --questions-per-concurrency-base 32
SERVING_cpu = --seconds 4
# Fewer runs than by default, so that two cores need minutes; what they show is in docs/losslessness.md.
COMPARE_tiny = --runs 96 --positions 8
ACCEPT_LENGTH = 6 to 10 tokens a round with the bundled pair

# A fixed choice, made once: the shell commands above would otherwise run at every use.
PYTHON := $(PYTHON)
ACCEL  := $(ACCEL)
export BUILD
QUEUE   = $(PYTHON) -m patches
BIN     = $(VENV)/bin
PYTEST  = $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder --durations=10
LAUNCH  = exec env $(ENV_$(ACCEL)) $(BIN)/python -m sglang.launch_server --model-path $(MODEL) \
	--port $(PORT) $(SERVER_$(ACCEL))
DFLASH  = --speculative-algorithm DFLASH --speculative-draft-model-path $(DRAFT)
# One of the held-out problems of checkpoints/tiny/data/test.jsonl; the answer is 311.
QUESTION = Alma has 54 marbles. Carla had 5 times as many but lost 13 of them. \
	How many marbles do Alma and Carla have together?
ASK     = curl -s localhost:$(PORT)/v1/chat/completions -H 'Content-Type: application/json' -d \
	'{"model": "default", "temperature": 0, "messages": [{"role": "user", "content": "$(QUESTION)"}]}'

.DEFAULT_GOAL := help
.PHONY: help setup dev serve serve-plain test test-quick test-long test-gpu losslessness sweep serving lint fetch apply unapply refresh check-patches \
	rebase lock wheels tiny-pair inflate clean python

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' \
	| awk -F'|' '{printf "  %-14s %s\n", $$1, $$2}'
	@echo "For example: make serve PORT=8000 ARGS=\"--tp-size 2\"; make losslessness COMPARE=\"--limit 20 --mode greedy\";"
	@echo "make sweep SWEEP=\"--concurrencies 1,8\"; make serving SERVING=\"--systems v2 --loads 1,8,2/s\";"
	@echo "make tiny-pair OUT=pair TRAIN=\"--seed 1\"; make test ARGS=\"-k stop\"."
	@echo "Of all: ACCEL=cpu|cuda PYTHON VENV BUILD, DEV=1 (as make dev)"

python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or 3.12 with the module venv was found:" \
	"install one (python3 and python3-venv), or name it with PYTHON=…" >&2; exit 1; }
	@case "$(ACCEL)" in cpu|cuda) ;; *) \
	echo "error: ACCEL is $(ACCEL), but must be cpu or cuda" >&2; exit 1;; esac

setup: python ## make .venv with the patched SGLang and the overlay
	@$(PYTHON) -m requirements.environment --accel $(ACCEL) --venv $(VENV) --build $(BUILD) \
	$(if $(DEV),--dev)

dev: ## like setup, but run build/sglang as it is, with edits that are not in patches/ yet
	@$(MAKE) --no-print-directory setup DEV=1

serve: setup ## serve MODEL with DFlash speculation by DRAFT on PORT; ARGS are server arguments
	$(info When it is up, ask it:  $(ASK))
	$(info Expect an accept length of $(ACCEPT_LENGTH). After a few requests localhost:$(PORT)/server_info \
	has it as avg_spec_accept_length.)
	@$(LAUNCH) $(DFLASH) $(ARGS)

serve-plain: setup ## the same without speculation; MODEL PORT ARGS
	$(info When it is up, ask it:  $(ASK))
	@$(LAUNCH) $(ARGS)

test: setup ## unit tests, tests of the patch queue, tests on a real server; JOBS at once, ARGS of pytest
	@$(PYTEST) -m "not long" $(wildcard tests/unit tests/patches tests/server) $(ARGS)

test-quick: setup ## unit tests, and an answer of each worker; JOBS at once, ARGS of pytest
	@$(PYTEST) -m quick $(wildcard tests/unit tests/server) $(ARGS)

test-long: setup ## what takes long by nature: before a problem is called solved; JOBS at once, ARGS of pytest
	@$(PYTEST) -m long $(wildcard tests/unit tests/patches tests/server) $(ARGS)
	@DFLASH_TEST_PROMPTS=30 $(PYTEST) -m "not long" \
	$(foreach name,features formats pool sweep,tests/server/test_$(name).py) $(ARGS)

test-gpu: setup ## tests of servers and kernels on a GPU; without one, says so; ARGS of pytest
	@if nvidia-smi -L 2>/dev/null | grep -q GPU; then \
	DFLASH_TEST_DEVICE=cuda $(BIN)/python -m pytest tests/server tests/gpu tests/unit/test_kernels.py tests/unit/test_argmax.py \
	tests/unit/test_triton_attention.py tests/unit/test_triton_side_by_side.py tests/unit/test_penalty_kernels.py \
	tests/unit/test_penalties.py tests/unit/test_grammar.py tests/unit/test_linear_kernels.py tests/unit/test_adapter_products.py \
	tests/unit/test_adapter_rows.py tests/unit/test_adapter_sums.py tests/unit/test_ragged.py tests/unit/test_side_by_side.py \
	tests/unit/test_at_once_check.py tests/unit/test_fp8_ways.py $(ARGS); \
	else echo "make test-gpu: skipped, because nvidia-smi lists no GPU here"; fi

losslessness: setup ## compare MODEL with DRAFT and without, on PROMPTS; its options are COMPARE, those of servers ARGS: docs/losslessness.md
	@env $(ENV_$(ACCEL)) $(BIN)/python -m sglang_dflash.losslessness --prompts $(PROMPTS) \
	--model-path $(MODEL) --draft-model-path $(DRAFT) \
	$(if $(filter checkpoints/tiny/target,$(MODEL)),$(COMPARE_tiny)) $(COMPARE) -- $(SERVER_$(ACCEL)) $(ARGS)

sweep: setup ## plain decoding against DFLASH on GSM8K for MODEL and DRAFT; its options are SWEEP, those of servers ARGS: docs/sweep.md
	@mkdir -p $(BUILD)/sweep
	@env $(if $(filter cpu,$(ACCEL)),CUDA_VISIBLE_DEVICES=) $(BIN)/python benchmark/bench_gsm8k_sweep.py \
	--target-model $(MODEL) --draft-model $(DRAFT) --output-file $(BUILD)/sweep/gsm8k.jsonl --resume \
	--plot $(BUILD)/sweep/plots $(if $(filter checkpoints/tiny/target,$(MODEL)),$(SWEEP_tiny)) $(SWEEP) \
	$(if $(ARGS),-- $(ARGS))

serving: setup ## what users get of servers, plain decoding and DFLASH of MODEL and DRAFT; its options are SERVING: docs/serving-benchmark.md
	@mkdir -p $(BUILD)/serving
	@env $(if $(filter cpu,$(ACCEL)),CUDA_VISIBLE_DEVICES=) $(BIN)/python benchmark/serving.py \
	--target-model $(MODEL) --draft-model $(DRAFT) --output-file $(BUILD)/serving/serving.jsonl --resume \
	--plot $(BUILD)/serving/plots $(SERVING_$(ACCEL)) $(SERVING)

lint: setup ## ruff check, ruff format --check, and the order of imports
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports --no-logo --no-cache

fetch: python ## download the pinned SGLang wheel, hash-checked
	@$(QUEUE) fetch

apply: python ## make build/sglang the patched release
	@$(QUEUE) apply

unapply: python ## put build/sglang back on the release as published
	@$(QUEUE) unapply

refresh: python ## write the commits in build/sglang to patches/
	@$(QUEUE) refresh

check-patches: python ## check headers, files, application and size of the series
	@$(QUEUE) check

rebase: python ## try the series on another release: make rebase TO=0.5.11
	@test -n "$(TO)" || { echo "error: name the release: make rebase TO=<version>" >&2; exit 1; }
	@$(QUEUE) rebase $(TO)

lock: setup ## resolve requirements/*.in again and write the locks
	@$(PYTHON) -m requirements.lock --uv $(BUILD)/bootstrap/bin/uv

wheels: setup ## write the patched SGLang and the overlay as two wheels to DIST; docs/scale.md
	@rm -rf build/lib && mkdir -p $(DIST) && rm -f $(DIST)/sglang*.whl
	@cp "$$($(BUILD)/bootstrap/bin/python -m patches --build $(BUILD) pack)" $(DIST)
	@$(BUILD)/bootstrap/bin/uv build --quiet --wheel --no-build-isolation --offline --python $(BIN)/python --out-dir $(DIST)
	@ls $(DIST)/*.whl

tiny-pair: setup ## train the bundled pair again, into OUT (checkpoints/tiny); options of its trainer are TRAIN, as TRAIN=--help
	@$(BIN)/python -m checkpoints.trainer --out $(OUT) $(TRAIN)

inflate: setup ## write MODEL and DRAFT into the SHAPE of a large pair: make inflate SHAPE=qwen3-8b; docs/inflated-pairs.md
	@test -n "$(SHAPE)" || { echo "error: name the shape: make inflate SHAPE=qwen3-8b" >&2; exit 1; }
	@$(BIN)/python -m checkpoints.inflate --shape $(SHAPE) --target $(MODEL) --drafter $(DRAFT) \
	--out $(BUILD)/inflated/$(SHAPE)

clean: python ## remove .venv and build/; refused while build/sglang has work that patches/ lacks
	@$(QUEUE) unapply
	rm -rf $(VENV) $(BUILD)

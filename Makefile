# Two commands set everything up: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
MINUTES ?= 2
DEMO ?= runs/demo$(if $(filter-out 2,$(MINUTES)),-$(MINUTES)min)
# Where torch comes from. Empty: pip's own configuration. For the small CPU build elsewhere, give the address of
# PyTorch's CPU index (it stands on PyTorch's "Get Started" page): make demo TORCH_INDEX=ADDRESS
TORCH_INDEX ?=
JOBS ?= 2
PY = $(VENV)/bin/python
NEEDS = This needs Python 3.11 or newer with venv, git and make. On Debian or Ubuntu: apt install git make python3-venv

.PHONY: help demo test test-slow test-gpu lint bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo            train a small model on three novels and write runs/demo/report.html (MINUTES=2; others: runs/demo-30min)"
	@echo "make test            run the tests (JOBS=2)"
	@echo "make lint            ruff and pyright"
	@echo "make test-slow       the tests that take minutes"
	@echo "make test-gpu        the tests that need a GPU"
	@echo "make bench           the benchmarks of the CPU; results go to benchmarks/results/"
	@echo "make clean           remove the virtual environment (runs/ stays)"
	@echo "Options: PYTHON=python3.12  VENV=.venv  TORCH_INDEX=ADDRESS of an index that has the torch build you want"

demo: $(VENV)/.ready-demo
	@$(PY) -m tdlm demo --minutes $(MINUTES) --out $(DEMO)

test: $(VENV)/.ready-test
	@$(PY) -m pytest -q -n $(JOBS) --dist worksteal --durations=5

test-slow: $(VENV)/.ready-test
	@$(PY) -m pytest -q -m slow --durations=5

test-gpu: $(VENV)/.ready-test
	@TDLM_SHAPES=0 $(PY) -m pytest -q -m gpu  # a compiler and the checker of shapes do not go together

lint: $(VENV)/.ready-test
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/pyright

bench: $(VENV)/.ready-test
	@for name in prepare loader train_step objectives tree; do $(PY) -m benchmarks.$$name || exit 1; done

$(VENV)/.ready-venv:
	@$(PYTHON) -c "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || { echo "$(NEEDS)"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(NEEDS)"; exit 2; }
	@touch $@

$(VENV)/.ready-demo: $(VENV)/.ready-venv requirements/torch.txt requirements/demo.txt pyproject.toml
	@echo "Setting up $(VENV). To be downloaded: $$(cat requirements/torch.txt) (about 200 MB as a CPU build, several GB with CUDA;"
	@echo "TORCH_INDEX=ADDRESS chooses the index) and about 60 MB of other packages: $$(tr '\n' ' ' < requirements/demo.txt)"
	@$(PY) -m pip install --disable-pip-version-check -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r requirements/torch.txt
	@$(PY) -m pip install --disable-pip-version-check -q -r requirements/demo.txt
	@$(PY) -m pip install --disable-pip-version-check -q --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-demo requirements/test.txt
	@echo "To be downloaded for the tests, about 200 MB: $$(grep -v '^-r' requirements/test.txt | tr '\n' ' ')"
	@$(PY) -m pip install --disable-pip-version-check -q -r requirements/test.txt
	@touch $@

clean:
	rm -rf $(VENV)

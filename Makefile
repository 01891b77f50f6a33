# One environment in .venv, made on first use. `make` alone lists what there is.
PYTHON   ?= python3
VENV     ?= .venv
WORKERS  ?= 2
NB_LIMIT ?= 1800

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
RUN := $(VENV)/.stamp-run
DEV := $(VENV)/.stamp-dev
# Without a GPU Triton's kernels are interpreted. Triton decides that when it is first imported, and a worker runs many
# notebooks: it must be told before the first.
INTERPRET := import torch; print("" if torch.cuda.is_available() else "TRITON_INTERPRET=1")
# Notebooks run several at a time, one thread each; what hangs is ended, workers included (NB_LIMIT=seconds allows more).
NBDEV_TEST = env $$($(BIN)/python -c '$(INTERPRET)') OMP_NUM_THREADS=1 timeout --kill-after=20 $(NB_LIMIT) $(BIN)/nbdev_test --n_workers $(WORKERS) --timing

.DELETE_ON_ERROR:
.PHONY: help demo test test-all check lab docs readme export clean-nbs clean

help:
	@echo "make demo       answer a few prompts with a small real model, on this machine"
	@echo "make test       everything that CI runs: notebooks, then tests/"
	@echo "make test-all   the same, with the slow cells and tests"
	@echo "make check      only the checks on the repository itself"
	@echo "make lab        JupyterLab on the notebooks"
	@echo "make docs       the documentation site, in _docs/, and README.md"
	@echo "make readme     README.md, from nbs/index.ipynb"
	@echo "make export     notebooks -> package, and the sidebar of the site"
	@echo "make clean-nbs  strip execution counts and other noise from the notebooks"
	@echo "make clean      remove what was built (.venv stays)"

demo: $(RUN)
	$(BIN)/minivllm generate

# $(call both,nbdev_test's options,pytest's): both halves run even if the first fails. pytest comes last, so that its
# count closes the output; where the notebooks failed, that is said again below it.
define both
	@$(NBDEV_TEST) $(1); notebooks=$$?; \
	$(BIN)/python -m pytest -q $(2); tests=$$?; \
	[ $$notebooks = 0 ] || echo "notebooks: failed, or not done within $(NB_LIMIT) s; their output stands before that of the tests"; \
	exit $$((notebooks || tests))
endef

test: $(DEV)
	$(call both)

test-all: $(DEV)
	$(call both,--flags slow,-m "slow or not slow")
test-all: NB_LIMIT := 7200

check: $(DEV)
	$(BIN)/python -m pytest -q tests/test_repo.py

lab: $(DEV)
	$(BIN)/jupyter lab nbs

docs: $(DEV)
	$(BIN)/python tools/build_docs.py

readme: $(DEV)
	$(BIN)/python tools/readme.py

export: $(DEV)
	$(BIN)/nbdev_export
	$(BIN)/python tools/sidebar.py

clean-nbs: $(DEV)
	$(BIN)/nbdev_clean

clean:
	rm -rf _docs _proc build dist *.egg-info .pytest_cache .hypothesis

# The environment, in two steps: what the package needs to run, then what its authors need.
# requirements-ci.txt pins both; settings.ini says what the package itself asks for.
$(RUN): settings.ini setup.py pyproject.toml requirements-ci.txt | $(BIN)/python
	@echo "Installing minivllm into $(VENV) (once; a minute or two)"
	@$(PIP) install --constraint requirements-ci.txt --editable .
	@touch $@

$(DEV): $(RUN)
	@echo "Installing the development tools into $(VENV) (once; a minute or two)"
	@$(PIP) install --requirement requirements-ci.txt
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "minivllm needs Python 3.11 or newer: make ... PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "This Python cannot make virtual environments: its venv or ensurepip module is missing."; \
	    echo "On Debian and Ubuntu: apt install python3-venv. Or name another Python: make ... PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

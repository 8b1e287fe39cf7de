# `make demo` and `make test` set up all they need in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What is never imported is never compiled; what is, once.
unexport PYTHONDONTWRITEBYTECODE
# Not quiet: torch and its libraries are gigabytes, whose progress pip shows.
INSTALL := $(BIN)/pip install --no-compile -c constraints.txt

.PHONY: demo test test-slow test-all speed lint docs gpu-test clean

demo: $(VENV)/.runs
	$(BIN)/sweep run configs/demo.yaml
	$(BIN)/sweep report results/demo

# The default tier: minutes.
test: $(VENV)/.tests
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup

# All other tiers that need no GPU, and all tiers together. After BUDGET_S seconds, the slow tests that are left are
# skipped; SEED decides the order of their files. Tests that fail are repeated one by one and must fail again.
MUTANTS ?= 10000
BUDGET_S ?= inf
SEED ?=
ALL = $(BIN)/python -m pytest -q -n 3 --dist loadgroup --mutants $(MUTANTS) --durations 30
SLOW = "(slow or process or ray or compile or render or fuzz or docs or browser) and not gpu"
test-slow: $(VENV)/.tests
	$(ALL) -m $(SLOW) --budget-s $(BUDGET_S) --shuffle "$(SEED)" \
		|| $(BIN)/python -m pytest -q -m $(SLOW) --last-failed --last-failed-no-failures none

test-all: $(VENV)/.tests
	$(ALL) -m "not gpu"

# Limits on CPU time and memory. They fail on a machine that is busy, so that no test has them.
speed: $(VENV)/.tests
	$(BIN)/python benchmarks/commands.py
	$(BIN)/python benchmarks/prediction.py
	$(BIN)/python benchmarks/report.py

lint: $(VENV)/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, for build/docs/index.html; a warning, such as a broken link, is an error.
docs: $(VENV)/.tests
	$(BIN)/python -m sphinx -q -W --keep-going docs build/docs

gpu-test: $(VENV)/.tests
	$(BIN)/python -m pytest -q -m gpu

$(VENV)/.runs: pyproject.toml constraints.txt
	@echo 'installing torch, Ray and what they need into $(VENV)'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

$(VENV)/.tests: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]'
	touch $(VENV)/.runs $@

clean:
	rm -rf $(VENV)

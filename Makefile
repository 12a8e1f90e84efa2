# make bench: a quick run of the whole bench on this machine, ending with the report.
# make test: lint, types and the tests. Both install what they need into .venv first.

PYTHON := .venv/bin/python
STAMP := .venv/.installed
# Tests run side by side, but one after the other on a GPU, which one process takes, or without pytest-xdist.
SIDE_BY_SIDE = import xdist; print("-n auto --maxprocesses=4 --dist=worksteal")
PYTEST = $(PYTHON) -m pytest -q $$(command -v nvidia-smi >/dev/null || $(PYTHON) -c '$(SIDE_BY_SIDE)' 2>/dev/null)

.PHONY: bench test test-full fuzz lint clean

bench: $(STAMP)
	$(PYTHON) -m bench.quick

test: lint
	$(PYTEST) -m "not slow"

test-full: lint
	$(PYTEST)

fuzz: $(STAMP)
	$(PYTHON) -m bench.fuzz --seconds=600

lint: $(STAMP)
	@if $(PYTHON) -m ruff --version >/dev/null 2>&1; then \
	  $(PYTHON) -m ruff check . && $(PYTHON) -m mypy; \
	else echo "lint skipped: ruff is not installed on this machine"; fi

$(STAMP): pyproject.toml constraints.txt
	sh .ci/environment
	touch $@

clean:
	rm -rf .venv build out .hypothesis .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

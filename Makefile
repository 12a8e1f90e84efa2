# make bench: a quick run of the whole bench on this machine, ending with the report.
# make test: lint, types and the tests. Both install what they need into .venv first.

PYTHON := .venv/bin/python
STAMP := .venv/.installed

.PHONY: bench test test-full fuzz lint clean

bench: $(STAMP)
	$(PYTHON) -m bench.quick

test: lint
	$(PYTHON) -m pytest -q -m "not slow"

test-full: lint
	$(PYTHON) -m pytest -q

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

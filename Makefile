# `make` alone lists what there is.

PYTHON ?= python3
BIN := .venv/bin
PYTEST_JOBS ?= 4

.DEFAULT_GOAL := help
.PHONY: help install locked test lint types unit soak cluster browser sshd iptables quick coverage demo docs audit picture record walk prove clean

help:     ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

install: .venv/.installed  ## create .venv with everything in it (PYTHON=python3.12 picks the interpreter)

locked:  ## the same on Linux, where every package has to have its digest of requirements.lock
	@test ! -e .venv || { echo "there is a .venv already, with packages that were not compared: remove it first"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python tests/lock.py --install
	@touch .venv/.installed

test: lint types unit  ## install, then every check below

lint: install  ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## mypy, strict
	$(BIN)/mypy

unit: install browser sshd .venv/.compiled  ## the tests, in four processes for two cores (PYTEST_JOBS=8 on a larger machine)
	$(BIN)/pytest -n $(PYTEST_JOBS) --dist loadfile --no-loadscope-reorder -m 'not soak and not cluster' --durations=25

soak: install sshd iptables  ## what takes minutes by its nature: hundreds of disasters, many kills, ten minutes of faults of every kind
	$(BIN)/pytest -n $(PYTEST_JOBS) --dist loadfile -m soak
	$(BIN)/python tests/prove.py --only 'faults of every kind'

cluster: install sshd  ## islands on a real Slurm of virtual nodes, by ssh, and of several processes (half an hour; root, Debian)
	$(BIN)/pytest -m cluster

browser:  ## Debian's chromium, where it is missing and may be installed: a test opens a report in it
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ [ "$$(id -u)" = 0 ] && apt-get update && apt-get install -y --no-install-recommends chromium; } || \
		echo "NO CHROMIUM: the tests will NOT open the report of a simulation in a browser" >&2

sshd:     ## OpenSSH's server, where it is missing and may be installed: a test launches islands on hosts
	@command -v sshd || test -x /usr/sbin/sshd || \
		{ [ "$$(id -u)" = 0 ] && apt-get update && apt-get install -y --no-install-recommends openssh-server openssh-client; } || \
		echo "NO SSHD: the tests will NOT launch islands by ssh" >&2

iptables:  ## where it is missing and may be installed: a test publishes ports as containers do
	@command -v iptables || test -x /usr/sbin/iptables || \
		{ [ "$$(id -u)" = 0 ] && apt-get update && apt-get install -y --no-install-recommends iptables; } || \
		echo "NO IPTABLES: the tests will NOT reach an island in a container" >&2

quick: install  ## the tests without the slow ones
	$(BIN)/pytest -m 'not slow and not soak and not cluster'

# hundreds of seeds of the harsh campaign, which take an hour under the tracer
CAMPAIGN := test_harsh_disasters_violate_nothing

coverage: install browser .venv/.compiled  ## which lines of the product every test together runs, processes that tests start included
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -n $(PYTEST_JOBS) --dist loadfile -k "not $(CAMPAIGN)"; status=$$?; \
		$(BIN)/python -m coverage combine --quiet; rm -f .coverage.*; \
		$(BIN)/python -m coverage report && exit $$status

demo: install  ## four islands train one model, one is killed and comes back; then a slow link (three minutes)
	$(BIN)/diloco demo

docs: install  ## build the documentation into site/ (its tools are installed if they are missing)
	@$(BIN)/python -c 'import material, mkdocs' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

audit: install  ## known vulnerabilities of what is installed, where their database can be reached
	@$(BIN)/python tests/audit.py

picture: install  ## draw the rooms from the imports into ARCHITECTURE.md
	$(BIN)/python tests/house.py --write

record: install  ## run the README's two commands and draw what they print (five minutes)
	$(BIN)/python tests/recording.py

walk:     ## the README from a fresh clone to a sampled text, in an environment of its own, and its minutes (limit 6)
	$(PYTHON) tests/walk.py

prove: install  ## run every claim of the project that needs no GPU, and print one table
	$(BIN)/python tests/prove.py

clean:    ## remove caches and build outputs; keeps .venv and runs
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
	find . -path ./.venv -prune -o -name __pycache__ -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else \
		"diloco needs Python 3.11 to 3.13, $(PYTHON) is %d.%d: make install PYTHON=python3.12" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
	@echo 'diloco is installed. Next: source .venv/bin/activate && diloco run examples/quickstart.yaml'

# tests start some hundred processes: none of them is to compile what another one has, whatever the environment says
unit soak cluster coverage .venv/.compiled: export PYTHONDONTWRITEBYTECODE =

# once, before several processes would do it at the same time, for themselves: Numba keeps what it compiled on disk
.venv/.compiled: .venv/.installed $(wildcard comm/codec/*.py)
	$(BIN)/python -m compileall -q checkpoint comm diloco elastic
	$(BIN)/python -c 'from diloco.comm.codec.registry import CODECS, warm_up; [warm_up(name) for name in CODECS]'
	@touch $@

# make sweep: measure the convergence rates of the default study; results in results/sweep
# make report: all studies, in --quick size, as one page: results/report/report.html
# make test:  run the tests           make test-all: with the slow ones
# make test-oldest: the tests on the oldest versions that setup.cfg allows, with PYTHON=python3.10
#             to 3.12; where pip finds torch for CUDA alone, it fetches 3 GB
# make test-newest: the tests on the newest versions that pip finds, likewise; in both, what is
#             deprecated is an error where this project's modules use it
# make types: what mypy and pyright say of a user's program (installs both)
# make test-models: the optimizers on models of transformers, timm, x-transformers, Lightning and
#             accelerate, which it installs; models are built from configs, nothing is downloaded
# make test-card: the kernels for a CUDA card in Triton's interpreter, without a card; it installs
#             Triton (3.9.0 when this was written), 0.3 GB to fetch and 1 GB on disk, of no fixed
#             version: torch's build for CUDA brings its own. Where Triton is, make test does this too
# make stress: kill sweeps, workers and schedulers, fill disks; compare engines; measure memory
# make bench: compare with the peers (installs jax, optax, diffrax); results in results/bench
# make gpu:   on a machine with a CUDA card: the tests that need one, then results/gpu/gpu.md, in
#             less than 8 minutes; where .venv holds torch for the CPU, it is replaced by the other
# make docs:  the pages as a site, in site/; notebooks are run, which takes some minutes
#             (NOTEBOOKS=false leaves them without what their cells show)
# make lint:  ruff
PYTHON ?= python3
BIN := .venv/bin
# One process a core, one thread each; the tests of a file in one process, for they share what is
# computed once.
PARALLEL := -q -n auto --dist loadfile

.PHONY: sweep report test test-all test-oldest test-newest types test-models test-card stress bench \
	gpu docs lint clean

sweep: .venv/installed
	$(BIN)/ipslimit sweep --out results/sweep

report: .venv/installed
	$(BIN)/ipslimit study all --quick --out results/report

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL)

test-all: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "slow or not slow"

test-oldest test-newest: test-%: .venv-%/installed
	DEPRECATED=error OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest $(PARALLEL)

types: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[types]"
	$(BIN)/python -m pytest -q -m slow tests/test_installed.py -k typed

test-models: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[models]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m models tests/models

test-card: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[card]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto tests/test_card.py

stress: .venv/installed
	$(BIN)/python -m pytest -q -m "slow or not slow" \
		tests/test_stress.py tests/test_engines.py tests/test_memory.py

bench: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[bench]"
	$(BIN)/python -m benchmarks --out results/bench

gpu: .venv/installed
	@$(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || \
		( $(BIN)/python -m pip uninstall -q -y torch && \
		$(BIN)/python -m pip install -q -c constraints.txt torch )
	$(BIN)/python -m pytest -q -m gpu
	$(BIN)/python -m benchmarks.card --out results/gpu

docs: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.venv/installed: constraints.txt
.venv-oldest/installed: constraints-oldest.txt
.venv/installed .venv-oldest/installed .venv-newest/installed: setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("ipslimit needs Python >= 3.10; set PYTHON=python3.12, say" \
		if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q $(addprefix -c ,$(filter constraints%,$^)) -e ".[dev,text]"
	@touch $@

clean:
	rm -rf .venv .venv-oldest .venv-newest results site

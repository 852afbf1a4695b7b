# `make demo` and `make test` need Python 3.10 or newer and make, nothing else. TENSORFLOW names the build of TensorFlow:
# the one for NVIDIA GPUs where there is one, else the small one where it exists. All give the same module, so that one
# environment may hold only one of them.
PYTHON ?= python3
TENSORFLOW ?= $(shell if command -v nvidia-smi > /dev/null; then echo "tensorflow[and-cuda]"; \
	elif [ "$$(uname -sm)" = "Linux x86_64" ]; then echo tensorflow-cpu; else echo tensorflow; fi)
OLDEST_TENSORFLOW ?= 2.16.2
CLIENTS_TENSORFLOW ?= 2.21.0
# TensorFlow's own tests, which its packages leave out.
TENSORFLOW_SOURCES ?= build/tensorflow-$(CLIENTS_TENSORFLOW)
NIGHTLY_TENSORFLOW ?= $(subst tensorflow-cpu,tf-nightly-cpu,$(subst tensorflow[,tf-nightly[,$(patsubst tensorflow,tf-nightly,$(TENSORFLOW))))
# The tests of the guarantees, which hold on the public names of TensorFlow alone.
LAWS := $(addprefix tests/laws/test_,laws.py gradients.py random.py state.py streams.py balance.py reduce.py \
	training.py pipeline.py pipeline_losses.py) tests/_tensorflow
VENV := .venv
BIN := $(VENV)/bin
# Tests run in this many processes. A process takes whole files, the longest first (tests/durations.json).
WORKERS ?= 2
PYTEST := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
export TF_CPP_MIN_LOG_LEVEL ?= 3

.PHONY: demo check lint types site test test-nightly test-full test-gpus test-plain test-clients test-oldest test-tf-nightly \
	mutants bench bench-quick pictures clean

demo: $(VENV)/examples.done
	$(BIN)/python examples/digits.py

# `make test` leaves out the tests that take a second or more; `make check` runs them, too.
MARKERS := not nightly and not slow
check: MARKERS := not nightly
check: lint types site test

# Each value of each parameter once, on 1, 2 and 3 devices; one smoke test per guarantee on emulated GPUs.
test: $(VENV)/native.done
	$(BIN)/python $(PYTEST) -m "$(MARKERS)" --junitxml=build/test.xml

# Everything that `make check` leaves out. A part that fails does not stop the others.
test-nightly:
	$(MAKE) --keep-going test-full test-gpus test-plain test-clients test-oldest test-tf-nightly

# All tests, with all parameters crossed and all device sets; Ray and other hosts; all tests on emulated GPUs.
test-full: $(VENV)/native.done
	$(BIN)/python $(PYTEST) -m "" --all --junitxml=build/test-full.xml

# The guarantees on four emulated GPUs (benchmarks/softgpu), with all parameters crossed.
test-gpus: $(VENV)/native.done
	$(BIN)/python $(PYTEST) -m "" --all --gpus 4 --junitxml=build/test-gpus.xml tests/laws tests/store/test_states.py tests/cli/test_check.py

# The guarantees on the public names of TensorFlow alone. Tests that need others are skipped.
test-plain: $(VENV)/native.done
	$(BIN)/python $(PYTEST) -m "" --plain --junitxml=build/test-plain.xml $(LAWS)

# Functions of other packages (tools/clients). The packages come without their dependencies, which name another build of
# TensorFlow; the group `clients` has the rest.
test-clients: .venv-clients/installed.done $(TENSORFLOW_SOURCES)
	TENSORFLOW_SOURCES=$(TENSORFLOW_SOURCES) .venv-clients/bin/python $(PYTEST) --junitxml=build/test-clients.xml tools/clients $(TESTS)

# The oldest supported TensorFlow. It needs NumPy 1. Ray's columns and pyarrow 26 need NumPy 2.
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet "$(TENSORFLOW)==$(OLDEST_TENSORFLOW)" "numpy<2" "pyarrow<26" --group test
	.venv-oldest/bin/python -m pip install --quiet --no-deps --editable .
	.venv-oldest/bin/python $(PYTEST) --junitxml=build/test-oldest.xml --ignore tests/test_ray.py
	.venv-oldest/bin/python $(PYTEST) --all -m nightly tests/compile/test_vectorizable_ops.py

# TensorFlow's nightly build: which non-public names are gone, and whether the guarantees hold.
test-tf-nightly:
	$(PYTHON) -m venv .venv-nightly
	.venv-nightly/bin/python -m pip install --quiet --upgrade pip
	.venv-nightly/bin/python -m pip install --quiet --upgrade "$(NIGHTLY_TENSORFLOW)" --group test
	.venv-nightly/bin/python -m pip install --quiet --no-deps --editable .
	.venv-nightly/bin/python $(PYTEST) --junitxml=build/test-tf-nightly.xml
	.venv-nightly/bin/python $(PYTEST) -m nightly tests/compile/test_vectorizable_ops.py -k calls_of_each_op

# Small changes of the package, one at a time, that should make a test fail. `make mutants N=20` draws 20 of them.
N ?= 200
mutants: build/mutants/recorded.done
	$(BIN)/python tools/mutants.py $(N)

# The tests that execute each line, and their seconds.
build/mutants/recorded.done: $(VENV)/native.done $(wildcard devicemap/*/*.py tests/*.py tests/*/*.py)
	$(BIN)/python -m pip install --quiet --group mutants
	rm -rf build/mutants && mkdir -p build/mutants
	-CI=true COVERAGE_FOLDER=build/mutants PYTHONPATH=tools $(BIN)/python $(PYTEST) -p line_tests
	touch $@

lint: $(VENV)/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/words.py

types: $(VENV)/test.done
	$(BIN)/mypy

# The documentation, into build/site. What is wrong with a page, as a link that leads nowhere, is an error.
site: $(VENV)/site.done
	$(BIN)/mkdocs build --strict

# All pictures of the documentation: of devicemap itself, and of the examples.
pictures: $(VENV)/examples.done $(VENV)/test.done
	$(BIN)/python -m benchmarks.pictures docs/pictures
	for name in digits integrals inference fitting training; do \
		$(BIN)/python examples/$$name.py --simulate 2 --output docs/pictures/$$name.png || exit 1; \
	done
	$(BIN)/python examples/large.py --simulate 4 --output docs/pictures/large.png
	$(BIN)/python examples/images.py --output docs/pictures/images.png

# Every figure of the README, except that of its picture. `make bench TOPICS="balance memory"` runs some of it.
bench: $(VENV)/bench.done
	$(BIN)/python -m benchmarks $(TOPICS)

# Small cases of all benchmarks: that each runs, and that each way gives the right answer.
bench-quick: $(VENV)/bench.done
	$(BIN)/python -m benchmarks --quick $(TOPICS)

$(TENSORFLOW_SOURCES):
	git clone --quiet --depth 1 --branch v$(CLIENTS_TENSORFLOW) --filter=blob:none --sparse \
		https://github.com/tensorflow/tensorflow $@
	git -C $@ sparse-checkout set $(addprefix tensorflow/python/,kernel_tests/control_flow ops/parallel_for ops/ragged)

.venv-clients/installed.done: pyproject.toml
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --upgrade pip
	.venv-clients/bin/python -m pip install --quiet "$(TENSORFLOW)==$(CLIENTS_TENSORFLOW)" --group clients
	.venv-clients/bin/python -m pip install --quiet --no-deps --group clients-without-dependencies
	.venv-clients/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

# The package is installed without its dependencies, because the build of TensorFlow is the user's choice.
$(VENV)/installed.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TENSORFLOW)>=2.16" numpy rich
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

$(VENV)/test.done: $(VENV)/installed.done
	$(BIN)/python -m pip install --quiet --group test --group lint
	touch $@

# The C++ of the simulators, compiled before tests need it. Without a compiler their tests are skipped, and fail in CI.
$(VENV)/native.done: $(VENV)/test.done $(wildcard benchmarks/*.cc benchmarks/*/*.cc)
	if $(BIN)/python -m benchmarks.native; then touch $@; else test "$$CI" != true; fi

$(VENV)/site.done: $(VENV)/installed.done
	$(BIN)/python -m pip install --quiet --group site
	touch $@

$(VENV)/bench.done: $(VENV)/installed.done
	$(BIN)/python -m pip install --quiet --group bench
	touch $@

$(VENV)/examples.done: $(VENV)/installed.done
	$(BIN)/python -m pip install --quiet "scikit-learn>=1.4" "matplotlib>=3.8"
	touch $@

clean:
	rm -rf $(VENV) .venv-oldest .venv-nightly .venv-clients output build/site

# `make demo` and `make test` need Python 3.10 or newer and make, nothing else. TENSORFLOW names the build of TensorFlow:
# the one for NVIDIA GPUs where there is one, else the small one where it exists. All give the same module, so that one
# environment may hold only one of them.
PYTHON ?= python3
TENSORFLOW ?= $(shell if command -v nvidia-smi > /dev/null; then echo "tensorflow[and-cuda]"; \
	elif [ "$$(uname -sm)" = "Linux x86_64" ]; then echo tensorflow-cpu; else echo tensorflow; fi)
OLDEST_TENSORFLOW ?= 2.16.2
CLIENTS_TENSORFLOW ?= 2.21.0
NIGHTLY_TENSORFLOW ?= $(subst tensorflow-cpu,tf-nightly-cpu,$(subst tensorflow[,tf-nightly[,$(patsubst tensorflow,tf-nightly,$(TENSORFLOW))))
# The laws, which hold without anything of TensorFlow that is not public.
LAWS := $(addprefix tests/laws/test_,laws.py results.py gradients.py random.py state.py streams.py balance.py reduce.py training.py \
	pipeline.py) tests/_tensorflow
VENV := .venv
BIN := $(VENV)/bin
# Tests run in this many processes.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist worksteal
export TF_CPP_MIN_LOG_LEVEL ?= 3

.PHONY: demo test test-all test-crossed check lint types bench bench-quick site pictures forms test-plain test-gpus test-oldest test-nightly test-clients clean

demo: $(VENV)/examples.done
	$(BIN)/python examples/digits.py

# Each value of each parameter of a test once.
test: $(VENV)/test.done
	$(BIN)/python -m pytest $(PARALLEL)

# What takes long, as clusters and killed processes; the laws on GPUs in software.
test-all: $(VENV)/test.done
	$(BIN)/python -m pytest -m slow $(PARALLEL)
	$(BIN)/python -m pytest --gpus 4 $(PARALLEL) $(LAWS)

# All tests, also those that are like others, each value of each parameter with every other, and on eight devices, too: hours.
test-crossed: $(VENV)/test.done
	$(BIN)/python -m pytest -m "" --all $(PARALLEL)
	$(BIN)/python -m pytest -m "" --all --gpus 4 $(PARALLEL) $(LAWS)

check: lint types site test

lint: $(VENV)/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test.done
	$(BIN)/mypy

# The documentation, into build/site. What is wrong with a page, as a link that leads nowhere, is an error.
site: $(VENV)/site.done
	$(BIN)/mkdocs build --strict

# What the gallery shows.
pictures: $(VENV)/examples.done $(VENV)/test.done
	for name in digits integrals inference fitting training large; do \
		$(BIN)/python examples/$$name.py --simulate 2 --output docs/pictures/$$name.png || exit 1; \
	done
	$(BIN)/python examples/images.py --output docs/pictures/images.png

# Every figure of the README; a run that was stopped goes on. `make bench TOPICS="balance memory"` runs some of it.
bench: $(VENV)/bench.done
	$(BIN)/python -m benchmarks $(TOPICS)

# Two minutes, for CI: that the suite runs, and that every way gives the right answer.
bench-quick: $(VENV)/bench.done
	$(BIN)/python -m benchmarks --quick $(TOPICS)

# The list of ops that vectorise right, tried anew with the TensorFlow that is installed, which takes most of an hour.
# `python -m proving --and` keeps of the list that is there what holds with this TensorFlow, too.
forms: $(VENV)/test.done
	cd tests && PYTHONPATH=..:. ../$(BIN)/python -m proving

# With what TensorFlow makes public alone; what it cannot give is skipped, and says so.
test-plain: $(VENV)/test.done
	$(BIN)/python -m pytest -m "" --plain $(PARALLEL) $(LAWS)

# All that is for any devices, on GPUs in software (benchmarks/softgpu); but `explain` tells nothing of what a GPU copies
# between its own memory and the host's.
test-gpus: $(VENV)/test.done
	$(BIN)/python -m pytest -m "" --gpus 4 --ignore tests/tell/test_explaining.py

test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet "$(TENSORFLOW)==$(OLDEST_TENSORFLOW)" "numpy<2" --group test
	.venv-oldest/bin/python -m pip install --quiet --no-deps --editable .
	.venv-oldest/bin/python -m pytest $(PARALLEL)

# Others' packages, mapped (tests/clients). They come without their dependencies, which name another build of TensorFlow;
# what else they need is in the group `clients`.
test-clients: .venv-clients/installed.done
	.venv-clients/bin/python -m pytest $(PARALLEL) tests/clients $(TESTS)

.venv-clients/installed.done: pyproject.toml
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --upgrade pip
	.venv-clients/bin/python -m pip install --quiet "$(TENSORFLOW)==$(CLIENTS_TENSORFLOW)" --group clients
	.venv-clients/bin/python -m pip install --quiet --no-deps --group clients-without-dependencies
	.venv-clients/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

# The TensorFlow of tomorrow: which of its names that are not public go, and whether the laws hold then.
test-nightly:
	$(PYTHON) -m venv .venv-nightly
	.venv-nightly/bin/python -m pip install --quiet --upgrade pip
	.venv-nightly/bin/python -m pip install --quiet --upgrade "$(NIGHTLY_TENSORFLOW)" --group test
	.venv-nightly/bin/python -m pip install --quiet --no-deps --editable .
	.venv-nightly/bin/python -m pytest $(PARALLEL)

# The package is installed without its dependencies, because the build of TensorFlow is the user's choice.
$(VENV)/installed.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TENSORFLOW)>=2.16" numpy
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

$(VENV)/test.done: $(VENV)/installed.done
	$(BIN)/python -m pip install --quiet --group test --group lint
	touch $@

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

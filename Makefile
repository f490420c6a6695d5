# make demo            trains and scores the digits, from a fresh clone
# make test            checks of style, types and layers, and the tests of all parts: what to run while you work
# make test-all        everything but GPUs and what is slow: before a change lands
# make test-RING       a ring of tests: CONTRIBUTING.md lists them
# make test-versions   users' ways on other versions of Spark; VERSIONS="4.0.5" chooses
# make docs            the site, in out/site; scripts/notebooks.py runs its notebooks, and stores what they show

VENV ?= .venv
OLDER ?= .venv-petastorm
PYTHON ?= python3
BIN := $(VENV)/bin
PIP_INSTALL := python -m pip install --quiet --no-compile
# pip makes a wheel of Spark's source; compressing its jars again would take half of the time.
SPARK_INSTALL := $(PIP_INSTALL) --no-deps --config-settings=--build-option=--compression=stored pyspark

export SPARK_LOCAL_IP := 127.0.0.1
export MLFLOW_DISABLE_TELEMETRY := true
export PYSPARK_PYTHON := $(abspath $(BIN)/python)
# Images of containers often set it: then each of hundreds of processes would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo lint zip mlflow clean test test-all test-unit test-dist test-spark test-device test-paths \
	test-faults test-clock test-slow test-wheel test-petastorm test-versions test-gpu docs

setup: $(VENV)/.done
$(VENV)/.done: CHOSEN := -c constraints.txt
$(VENV)/.done: PARTS := -e ".[mlflow,connect,metrics,images,search,peft,onnx]" --group test --group docs
$(VENV)/.done: constraints.txt
$(OLDER)/.done: CHOSEN := -c constraints-petastorm.txt
$(OLDER)/.done: PARTS := -e ".[petastorm,metrics]" --group test-petastorm
$(OLDER)/.done: constraints-petastorm.txt

%/.done: pyproject.toml scripts/java.sh
	scripts/java.sh
	$(PYTHON) -m venv $*
	$*/bin/$(PIP_INSTALL) --upgrade "pip>=25.1"
	$*/bin/$(SPARK_INSTALL) $(CHOSEN)
	$*/bin/$(PIP_INSTALL) $(CHOSEN) $(PARTS)
	touch $@

%/spark.jsa: %/.done scripts/class_archive.py
	$*/bin/python scripts/class_archive.py $@ 2> $*/spark.jsa.log || { cat $*/spark.jsa.log; exit 1; }

zip: dist/sparktorch.zip
dist/sparktorch.zip: $(shell find sparktorch -name '*.py') scripts/package.py | setup
	$(BIN)/python scripts/package.py $@

demo: setup zip
	scripts/demo.sh $(BIN)

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_tests.py tests
	$(BIN)/python -m benchmarks.tables --check
	$(BIN)/python scripts/params.py --check

# Two rings at a time, the longest first: ranks mostly wait for each other. What looks at the clock runs afterwards.
AT_ONCE := $(MAKE) --no-print-directory --keep-going --jobs=2 \
	$(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
TOLD := @echo "tests: the output of a ring is shown when it has ended"
test: setup zip $(VENV)/spark.jsa
	$(TOLD)
	@$(AT_ONCE) "MARKED=not slow and not clock and not landing" test-spark test-dist test-device lint test-unit

test-all: setup zip $(VENV)/spark.jsa $(OLDER)/spark.jsa
	@mkdir -p out # the demo's, before tests look whether they have left files
	$(TOLD)
	@red=0; \
	$(AT_ONCE) test-paths test-dist test-spark test-petastorm test-faults test-device test-unit lint docs demo test-wheel \
		|| red=1; \
	$(MAKE) --no-print-directory test-clock || red=1; \
	exit $$red

MARKED := not slow and not clock
PYTEST = $(BIN)/python -m pytest -m "$(MARKED)"
APART := --numprocesses=2 --dist=loadfile # of the longest rings, two files at a time
RUN = $(PYTEST)

test-dist test-spark: RUN += $(APART)
test-unit test-dist test-spark test-device test-paths test-faults: setup zip $(VENV)/spark.jsa
	$(RUN) $(@:test-%=tests/%)

test-clock test-slow: setup zip $(VENV)/spark.jsa
	$(BIN)/python -m pytest -m "$(@:test-%=%)" $$(grep -rl --include='test_*.py' 'mark.$(@:test-%=%)' tests)

test-wheel: setup
	scripts/wheel.sh $(abspath $(BIN)/python)

# Petastorm warns of functions of pyarrow, and pyspark 3.5 uses what pandas takes away and leaves sockets open.
test-petastorm: export PYSPARK_PYTHON := $(abspath $(OLDER)/bin/python)
test-petastorm: PYTEST = $(OLDER)/bin/python -m pytest -m "$(MARKED) and not newest" -W ignore::FutureWarning \
	-W ignore::DeprecationWarning -W "ignore:unclosed <socket:ResourceWarning"
test-petastorm: $(OLDER)/spark.jsa
	red=0; $(PYTEST) $(APART) tests/petastorm tests/unit tests/spark || red=1; $(PYTEST) tests/paths && exit $$red

# The newest of each line of Spark, and of the older stack the oldest: each in an environment over one of those here.
VERSIONS ?= 3.5.0 4.0.5 4.1.4 4.2.1
test-versions: $(VERSIONS:%=test-version-%)
test-version-3%: UNDER := $(OLDER)
test-version-%: UNDER := $(VENV)
test-version-%: $(VENV)/.done $(OLDER)/.done
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/$(PIP_INSTALL) --config-settings=--build-option=--compression=stored pyspark==$*
	echo $(abspath $(UNDER))/lib/python*/site-packages > $$(echo $(VENV)-$*/lib/python*/site-packages)/under.pth
	PYSPARK_PYTHON=$(abspath $(VENV)-$*/bin/python) $(VENV)-$*/bin/python -m pytest -m "$(MARKED) and not newest" \
		-W ignore::FutureWarning -W ignore::DeprecationWarning -W "ignore:unclosed <socket:ResourceWarning" \
		tests/paths/test_paths.py tests/paths/test_shipping.py

test-gpu: setup
	$(BIN)/python -c "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 'torch sees no CUDA device here')"
	SPARKTORCH_TEST_DEVICE=cuda $(PYTEST) tests/unit tests/device tests/gpu
	SPARKTORCH_TEST_DEVICE=cuda $(PYTEST) tests/dist

docs: setup
	$(BIN)/sphinx-build -W --keep-going -q -b html docs out/site

mlflow: setup
	$(BIN)/mlflow ui --backend-store-uri sqlite:///out/mlflow.db --host 127.0.0.1

clean:
	rm -rf out dist build *.egg-info spark-warehouse

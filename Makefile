# make demo trains and scores the digits from a fresh clone, make test is for while you work, make test-all for before a
# change lands, and make docs makes the site, in out/site; CONTRIBUTING.md lists the others.

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

# An environment grows: Spark first, then what `make demo` needs, then what the tests and the site need as well.
setup: $(VENV)/.done
$(VENV)/.spark: CHOSEN := -c constraints.txt
$(OLDER)/.spark: CHOSEN := -c constraints-petastorm.txt
%/.spark: pyproject.toml scripts/java.sh
	scripts/java.sh
	@echo "making the environment $*, and installing Spark in it"
	$(PYTHON) -m venv $*
	$*/bin/$(PIP_INSTALL) --upgrade "pip>=25.1"
	$*/bin/$(SPARK_INSTALL) $(CHOSEN)
	touch $@

$(VENV)/.demo: $(VENV)/.spark constraints.txt
	@echo "installing torch, MLflow and this package in $(VENV)"
	$(BIN)/$(PIP_INSTALL) -c constraints.txt -e ".[mlflow]"
	touch $@

$(VENV)/.done: $(VENV)/.demo
	@echo "installing what the tests and the documentation need in $(VENV)"
	$(BIN)/$(PIP_INSTALL) -c constraints.txt -e ".[mlflow,connect,metrics,images,search,peft,onnx]" \
		--group test --group docs
	touch $@

$(OLDER)/.done: $(OLDER)/.spark constraints-petastorm.txt
	$(OLDER)/bin/$(PIP_INSTALL) -c constraints-petastorm.txt -e ".[petastorm,metrics]" --group test-petastorm
	touch $@

%/spark.jsa: %/.done scripts/class_archive.py
	$*/bin/python scripts/class_archive.py $@ 2> $*/spark.jsa.log || { cat $*/spark.jsa.log; exit 1; }

zip: dist/sparktorch.zip
dist/sparktorch.zip: $(shell find sparktorch -name '*.py') scripts/package.py | $(VENV)/.demo
	$(BIN)/python scripts/package.py $@

demo: $(VENV)/.demo zip
	scripts/demo.sh $(BIN)

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_tests.py tests
	$(BIN)/python -m benchmarks.tables --check && $(BIN)/python scripts/params.py --check && \
		$(BIN)/python scripts/reading.py --check

# Two rings at a time, the longest first; beside it faults, which mostly wait. What looks at the clock runs afterwards.
AT_ONCE := echo "tests: the output of a ring is shown when it has ended"; $(MAKE) --no-print-directory --keep-going \
	--jobs=2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
test: setup zip $(VENV)/spark.jsa
	@$(AT_ONCE) "MARKED=not slow and not clock and not landing" test-spark test-dist test-device lint test-unit

test-all: setup zip $(VENV)/spark.jsa $(OLDER)/spark.jsa
	@mkdir -p out # the demo's, before tests look whether they have left files
	@red=0; $(AT_ONCE) test-paths test-faults test-spark test-dist test-petastorm test-device test-unit lint docs demo \
		test-wheel || red=1; \
	$(MAKE) --no-print-directory test-clock || red=1; exit $$red

MARKED := not slow and not clock
PYTEST = $(BIN)/python -m pytest -m "$(MARKED)"
APART := --numprocesses=2 --dist=loadfile # of the longest rings, two files at a time
test-unit test-dist test-spark test-device test-paths test-faults: setup zip $(VENV)/spark.jsa
	$(PYTEST) $(if $(filter test-dist test-spark,$@),$(APART)) $(@:test-%=tests/%)

test-clock test-slow: setup zip $(VENV)/spark.jsa
	$(BIN)/python -m pytest -m "$(@:test-%=%)" $$(grep -rl --include='test_*.py' 'mark.$(@:test-%=%)' tests)

test-wheel: setup
	scripts/wheel.sh $(abspath $(BIN)/python)

# Petastorm warns of functions of pyarrow, and pyspark 3.5 uses what pandas takes away and leaves sockets open.
QUIET := -W ignore::FutureWarning -W ignore::DeprecationWarning -W "ignore:unclosed <socket:ResourceWarning"
test-petastorm: export PYSPARK_PYTHON := $(abspath $(OLDER)/bin/python)
test-petastorm: PYTEST = $(OLDER)/bin/python -m pytest -m "$(MARKED) and not newest" $(QUIET)
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
		$(QUIET) tests/paths/test_paths.py tests/paths/test_shipping.py

test-gpu: setup
	$(BIN)/python -c "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 'torch sees no CUDA device here')"
	SPARKTORCH_TEST_DEVICE=cuda $(PYTEST) tests/unit tests/device tests/gpu
	SPARKTORCH_TEST_DEVICE=cuda $(PYTEST) tests/dist

docs: setup
	$(BIN)/sphinx-build -W --keep-going -q -b html docs out/site

mlflow: $(VENV)/.demo
	$(BIN)/mlflow ui --backend-store-uri sqlite:///out/mlflow.db --host 127.0.0.1

clean:
	rm -rf out dist build *.egg-info spark-warehouse

# make demo   trains and scores the digits, from a fresh clone
# make test   runs every check, and all tests but Petastorm's
# make test-faults   of these, those that kill, stop and cut off what a fit runs on
# make test-petastorm   runs the tests beside the real Petastorm, on the older stack that it needs
# All set up what they need first.

VENV ?= .venv
PETASTORM_VENV ?= .venv-petastorm
PYTHON ?= python3
BIN := $(VENV)/bin
SHELL := /bin/bash

export SPARK_LOCAL_IP := 127.0.0.1
export MLFLOW_DISABLE_TELEMETRY := true
export PYSPARK_PYTHON := $(abspath $(BIN)/python)

.PHONY: setup demo test test-core test-spark test-faults test-petastorm lint zip mlflow clean

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt scripts/java.sh
	scripts/java.sh
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[mlflow,connect,metrics,images]" --group test
	touch $@

zip: dist/sparktorch.zip

dist/sparktorch.zip: $(shell find sparktorch -name '*.py')
	mkdir -p dist && rm -f $@
	python3 -c "import zipfile,sys; z=zipfile.ZipFile('$@','w',8); [z.write(p) for p in sys.argv[1:]]" $^

demo: setup zip
	scripts/demo.sh $(BIN)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The output of a target, where this make can hold it back until it is whole.
IN_ONE_PIECE := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

# Rings side by side, for most of the time ranks wait for each other; what looks at the clock, by itself afterwards.
test: setup zip lint
	@echo "tests/unit and tests/dist beside tests/spark: more than ten minutes on two cores, without a word"
	$(MAKE) --no-print-directory --jobs=2 $(IN_ONE_PIECE) test-core test-spark
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --skip-covered
	$(MAKE) --no-print-directory test-faults

test-core: setup
	COVERAGE_FILE=.coverage.core $(BIN)/python -m pytest --cov --cov-report= tests/unit tests/dist

test-spark: setup zip
	COVERAGE_FILE=.coverage.spark $(BIN)/python -m pytest --cov --cov-report= tests/spark

test-faults: setup
	$(BIN)/python -m pytest tests/faults

$(PETASTORM_VENV)/.done: pyproject.toml constraints-petastorm.txt scripts/java.sh
	scripts/java.sh
	$(PYTHON) -m venv $(PETASTORM_VENV)
	$(PETASTORM_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(PETASTORM_VENV)/bin/python -m pip install --quiet -c constraints-petastorm.txt \
		-e ".[petastorm,metrics]" --group test-petastorm
	touch $@

# Left out of the core are dear ones about torch, which is the same there, and about cross-validation.
OLD_STACK := tests/petastorm tests/unit \
	$(addprefix tests/spark/test_,exactness.py fit.py frame.py persistence.py petastorm.py scoring.py) \
	--deselect tests/spark/test_fit.py::test_it_works_in_a_pipeline_and_under_cross_validation \
	--deselect tests/spark/test_persistence.py::test_a_module_without_import_path_is_saved_as_its_graph \
	--deselect tests/spark/test_scoring.py::test_precision_and_compilation_change_the_scores_by_their_rounding_alone

# Petastorm warns of every function of pyarrow's that it calls; pyspark 4.0 leaves sockets to the garbage collector.
test-petastorm: export PYSPARK_PYTHON := $(abspath $(PETASTORM_VENV)/bin/python)
test-petastorm: $(PETASTORM_VENV)/.done
	$(PETASTORM_VENV)/bin/python -m pytest -W ignore::FutureWarning -W ignore::DeprecationWarning \
		-W "ignore:unclosed <socket:ResourceWarning" $(OLD_STACK)

mlflow: setup
	$(BIN)/mlflow ui --backend-store-uri sqlite:///out/mlflow.db --host 127.0.0.1

clean:
	rm -rf out dist build *.egg-info spark-warehouse

# make demo   trains and scores the digits, from a fresh clone
# make test   runs every check, and the tests of all parts: what to run while you work
# make test-all   all there is but for GPUs: also what users do in sessions of their own, kills, clocks, the older stack
#                 and the wheel: before a change lands
# make test-gpu   runs what a GPU can show, on a machine that has one: docs/gpu.md
# make test-faults   of these, those that kill, stop and cut off what a fit runs on
# make test-wheel   builds the wheel, and fits and scores with it in a fresh environment without extras
# make test-slow   runs the three that take minutes, or gigabytes
# make test-petastorm   runs the tests on the older stack, Spark 3.5 beside the real Petastorm
# All set up what they need first.

VENV ?= .venv
PETASTORM_VENV ?= .venv-petastorm
PYTHON ?= python3
BIN := $(VENV)/bin
SHELL := /bin/bash
# Python compiles what it imports when it does; of all that is installed, that is a small part.
PIP_INSTALL := python -m pip install --quiet --no-compile
# Spark comes as its source, of which pip makes a wheel: of jars, which to compress again takes half of the time.
SPARK_INSTALL := $(PIP_INSTALL) --no-deps --config-settings=--build-option=--compression=stored pyspark

export SPARK_LOCAL_IP := 127.0.0.1
export MLFLOW_DISABLE_TELEMETRY := true
export PYSPARK_PYTHON := $(abspath $(BIN)/python)
# Many images of containers set it; then each of hundreds of processes would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

# What may run beside other rings.
UNTIMED := not slow and not clock
# Of these, what runs at each change.
AT_EACH_CHANGE := $(UNTIMED) and not landing

.PHONY: setup demo test test-all test-unit test-dist test-dist-shared test-dist-rest test-spark test-spark-ml test-spark-rest test-faults test-paths test-clock test-device test-gpu nvidia test-petastorm \
	test-petastorm-core test-petastorm-paths test-wheel test-demo test-slow coverage lint zip mlflow clean

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt scripts/java.sh
	scripts/java.sh
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP_INSTALL) --upgrade "pip>=25.1"
	$(BIN)/$(PIP_INSTALL) -c constraints.txt torch
	$(BIN)/$(SPARK_INSTALL) -c constraints.txt
	$(BIN)/$(PIP_INSTALL) -c constraints.txt -e ".[mlflow,connect,metrics,images,search,peft]" --group test
	touch $@

# The classes of Spark, as JVMs of tests map them.
%/spark.jsa: %/.done scripts/class_archive.py
	$*/bin/python scripts/class_archive.py $@ 2> $*/spark.jsa.log || { cat $*/spark.jsa.log; exit 1; }

zip: dist/sparktorch.zip

dist/sparktorch.zip: $(shell find sparktorch -name '*.py') scripts/package.py | setup
	$(BIN)/python scripts/package.py $@

demo: setup zip
	scripts/demo.sh $(BIN)

# It says how many of the rows that it has not seen are right. Its JVMs are as those of other tests.
test-demo: export JAVA_TOOL_OPTIONS := $(JAVA_TOOL_OPTIONS) -XX:TieredStopAtLevel=1 -XX:+UseSerialGC \
	-XX:ReservedCodeCacheSize=240m -XX:SharedArchiveFile=$(abspath $(VENV)/spark.jsa) -Xlog:disable
test-demo: $(VENV)/spark.jsa demo
	grep '^held-out accuracy: 0\.9[5-9]' out/score.log

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_tests.py tests
	$(BIN)/python -m benchmarks.tables --check
	$(BIN)/python scripts/params.py --check

# The output of a target, where this make can hold it back until it is whole.
IN_ONE_PIECE := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

# So many parts at a time, for much of the time ranks wait for each other; the longest first.
AT_ONCE := 4
PARTS := test-spark-ml test-dist-rest test-dist-shared test-spark-rest test-device lint test-unit
BEFORE_LANDING := test-paths test-dist-shared test-faults test-spark-ml test-spark-rest test-dist-rest test-petastorm-core \
	test-device test-petastorm-paths test-unit lint test-demo test-wheel

# Archives are there before parts that want them: make would begin with others.
test: setup zip $(VENV)/spark.jsa
	@echo "tests: the output of a ring is shown when it has ended"
	@$(MAKE) --no-print-directory --keep-going --jobs=$(AT_ONCE) $(IN_ONE_PIECE) "UNTIMED=$(AT_EACH_CHANGE)" $(PARTS)

# What looks at the clock runs by itself afterwards.
test-all: setup zip $(VENV)/spark.jsa $(PETASTORM_VENV)/spark.jsa
	@mkdir -p out # the demo's, before tests look whether they have left files
	@echo "tests: the output of a ring is shown when it has ended"
	@red=0; \
	$(MAKE) --no-print-directory --keep-going --jobs=$(AT_ONCE) $(IN_ONE_PIECE) $(BEFORE_LANDING) || red=1; \
	$(MAKE) --no-print-directory test-clock || red=1; \
	exit $$red

test-unit: setup
	$(BIN)/python -m pytest $(COVERAGE) tests/unit

test-dist: setup
	$(BIN)/python -m pytest $(COVERAGE) -m "$(UNTIMED)" tests/dist

test-spark: setup zip $(VENV)/spark.jsa
	$(BIN)/python -m pytest $(COVERAGE) -m "$(UNTIMED)" tests/spark

# The two longest rings in halves, of about as long.
FITS := $(filter-out %/test_prepare.py %/test_fit_multiple.py,$(wildcard tests/spark/ml/test_*.py))

test-dist-shared: setup
	$(BIN)/python -m pytest -m "$(UNTIMED)" tests/dist/strategies tests/dist/checkpoint

test-dist-rest: setup
	$(BIN)/python -m pytest -m "$(UNTIMED)" tests/dist --ignore=tests/dist/strategies --ignore=tests/dist/checkpoint

test-spark-ml: setup zip $(VENV)/spark.jsa
	$(BIN)/python -m pytest -m "$(UNTIMED)" $(FITS)

test-spark-rest: setup zip $(VENV)/spark.jsa
	$(BIN)/python -m pytest -m "$(UNTIMED)" tests/spark $(addprefix --ignore=,$(FITS))

test-device: setup $(VENV)/spark.jsa
	$(BIN)/python -m pytest tests/device

nvidia:
	@command -v nvidia-smi > /dev/null || { echo "nvidia-smi is not on the PATH: is NVIDIA's driver installed here?"; exit 1; }

# What a GPU can show, on as many ranks as there are. The rings that need none are in `make test`.
test-gpu: nvidia setup
	$(BIN)/python -c "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 'torch sees no CUDA device here')"
	red=0; \
	for rings in "tests/unit tests/device tests/gpu" tests/dist; do \
		SPARKTORCH_TEST_DEVICE=cuda $(BIN)/python -m pytest -m "$(UNTIMED)" $$rings || red=1; \
	done; \
	exit $$red

test-paths: setup $(VENV)/spark.jsa
	$(BIN)/python -m pytest tests/paths

test-clock: setup $(VENV)/spark.jsa
	$(BIN)/python -m pytest -m "clock and not slow" $(shell grep -rl --include=*.py mark.clock tests/dist tests/spark tests/faults)

# Which lines of the package the tests of these rings run in their own process.
coverage: setup zip
	for ring in unit dist spark; do \
		COVERAGE_FILE=.coverage.$$ring $(MAKE) --no-print-directory COVERAGE="--cov --cov-report=" test-$$ring || exit 1; \
	done
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --skip-covered

test-wheel: setup
	scripts/wheel.sh $(abspath $(BIN)/python)

test-slow: setup zip $(VENV)/spark.jsa
	$(BIN)/python -m pytest -m slow tests

test-faults: setup $(VENV)/spark.jsa
	$(BIN)/python -m pytest -m "$(UNTIMED)" tests/faults

$(PETASTORM_VENV)/.done: pyproject.toml constraints-petastorm.txt scripts/java.sh
	scripts/java.sh
	$(PYTHON) -m venv $(PETASTORM_VENV)
	$(PETASTORM_VENV)/bin/$(PIP_INSTALL) --upgrade "pip>=25.1"
	$(PETASTORM_VENV)/bin/$(SPARK_INSTALL) -c constraints-petastorm.txt
	$(PETASTORM_VENV)/bin/$(PIP_INSTALL) -c constraints-petastorm.txt \
		-e ".[petastorm,metrics]" --group test-petastorm
	touch $@

# Left out of the core are tests about torch, which is the same there, and about what Spark has no part in; streams are
# in tests/paths.
LEFT_OUT := $(addprefix test_exactness.py::test_a_fit_equals_the_plain_loop,[1-4-label-True] [2-1-label-True] [3-1-target-True] \
	[3-4-label-True]) \
	$(addprefix test_fit.py::test_,schedule_clipping_precision_and_micro_batches_work_together \
	one_score_a_row_is_a_two_class_problem the_general_estimator_takes_any_loss_and_names_several_outputs \
	a_training_step_class_weights_frozen_parts_and_groups_work_together \
	two_ranks_meet_at_rank_0_where_the_driver_cannot_be_reached) \
	$(addprefix test_persistence.py::test_,a_module_without_import_path_is_saved_as_its_graph \
	a_module_with_neither_path_nor_graph_is_pickled_when_both_sides_say_so fitting_goes_on_from_a_loaded_model \
	an_instance_trains_from_its_own_weights_and_stays_as_it_was \
	a_model_round_trips_bit_for_bit[estimator1-TorchRegressionModel] \
	a_model_round_trips_bit_for_bit[estimator2-TorchModel]) \
	$(addprefix test_scoring.py::test_,precision_and_compilation_change_the_scores_by_their_rounding_alone \
	the_pandas_path_of_pyspark_4_0_scores_alike another_column_can_be_scored large_weights_score_alike \
	a_stream_is_scored_and_goes_on_where_it_stopped)
OLD_STACK := tests/petastorm tests/unit $(addprefix --ignore=tests/unit/,train distributed cli tracking model/test_export.py \
	test_simulate.py test_imports.py) \
	$(addprefix tests/spark/,checks/test_errors.py ml/test_exactness.py ml/test_fit.py frame/test_partition.py ml/test_persistence.py frame/test_petastorm.py frame/test_rows.py ml/test_scoring.py) \
	$(patsubst %,--deselect 'tests/spark/ml/%',$(LEFT_OUT))

# Petastorm warns of every function of pyarrow's that it calls; pyspark 3.5 uses what pandas is about to take away, and
# leaves sockets to the garbage collector.
OLD_PYTEST = $(PETASTORM_VENV)/bin/python -m pytest -W ignore::FutureWarning -W ignore::DeprecationWarning \
	-W "ignore:unclosed <socket:ResourceWarning"

test-petastorm: $(PETASTORM_VENV)/.done
	@echo "tests: the output of a ring is shown when it has ended"
	$(MAKE) --no-print-directory --keep-going --jobs=2 $(IN_ONE_PIECE) test-petastorm-core test-petastorm-paths

test-petastorm-core test-petastorm-paths: export PYSPARK_PYTHON := $(abspath $(PETASTORM_VENV)/bin/python)
test-petastorm-core: $(PETASTORM_VENV)/spark.jsa
	$(OLD_PYTEST) $(OLD_STACK)

# pyspark 3.5 has no server of Spark Connect in its package. Each value of the table occurs, not each pair.
test-petastorm-paths: $(PETASTORM_VENV)/spark.jsa
	$(OLD_PYTEST) tests/paths/test_paths.py tests/paths/test_shipping.py -k "not connect" -m "not pairs"

mlflow: setup
	$(BIN)/mlflow ui --backend-store-uri sqlite:///out/mlflow.db --host 127.0.0.1

clean:
	rm -rf out dist build *.egg-info spark-warehouse

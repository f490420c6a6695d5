# make demo   trains and scores the digits, from a fresh clone
# make test   runs every check and every test
# Both set up what they need first.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
SHELL := /bin/bash

export SPARK_LOCAL_IP := 127.0.0.1
export MLFLOW_DISABLE_TELEMETRY := true
export PYSPARK_PYTHON := $(abspath $(BIN)/python)

.PHONY: setup demo test lint zip mlflow clean

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

test: setup zip lint
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered

mlflow: setup
	$(BIN)/mlflow ui --backend-store-uri sqlite:///out/mlflow.db --host 127.0.0.1

clean:
	rm -rf out dist build *.egg-info spark-warehouse

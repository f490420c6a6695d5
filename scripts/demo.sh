#!/usr/bin/env bash
# Trains a small CNN on handwritten digits with two ranks, then scores the held-out rows from MLflow.
set -euo pipefail

bin=$1
config=conf/digits.yaml
started=$SECONDS
submit=("$bin/spark-submit" --properties-file conf/spark-defaults-local.conf
  --py-files dist/sparktorch.zip,jobs/models.py)

mkdir -p out
echo "training on 1,797 handwritten digits with two workers ($config)"
"${submit[@]}" jobs/train.py "$config"
echo "scoring the held-out digits with the model from MLflow"
"${submit[@]}" jobs/score.py "$config" | tee out/score.log

echo
grep '^held-out accuracy: 0\.9[5-9]' out/score.log # it is over 0.95, or the demo has failed
echo "wall time: $((SECONDS - started)) s"
echo "MLflow page: make mlflow, then open http://127.0.0.1:5000"

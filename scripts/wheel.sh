#!/usr/bin/env bash
# Builds the wheel, installs it in a fresh environment without extras, and has it fit, score, save and load there.
# Usage: scripts/wheel.sh [PYTHON], which has pip >= 25.1
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pip=("${1:-python3}" -m pip)
"${1:-python3}" -m venv --without-pip "$folder/venv"
python="$folder/venv/bin/python"
"${pip[@]}" wheel --quiet --no-deps --wheel-dir "$folder" "$root"
"${pip[@]}" --python "$python" install --quiet --no-compile -c "$root/constraints.txt" "$folder"/*.whl
cp "$root/scripts/wheel.py" "$folder"
cd "$folder" # nothing of the repository is on the path here
# What the optimising compiler makes does not pay in a JVM that lives for a minute.
export JAVA_TOOL_OPTIONS="${JAVA_TOOL_OPTIONS:-} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
PYTHONPATH="" PYSPARK_PYTHON="$python" "$python" wheel.py

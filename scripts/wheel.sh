#!/usr/bin/env bash
# Builds the wheel, installs it in a fresh environment without extras, and has it fit, score, save and load there.
# Usage: scripts/wheel.sh [PYTHON]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${1:-python3}" -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --no-compile --upgrade "pip>=25.1"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" "$root"
"$python" -m pip install --quiet --no-compile -c "$root/constraints.txt" "$folder"/*.whl
cp "$root/scripts/wheel.py" "$folder"
cd "$folder" # nothing of the repository is on the path here
PYTHONPATH="" PYSPARK_PYTHON="$python" "$python" wheel.py

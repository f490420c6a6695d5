#!/usr/bin/env bash
# Builds the wheel, installs it in a fresh environment without extras, and has it fit, score, save and load there.
# Usage: scripts/wheel.sh [PYTHON], which has pip >= 25.1
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pip=("${1:-python3}" -m pip)
"${pip[@]}" wheel --quiet --no-deps --wheel-dir "$folder" "$root"

# Beside a runtime's packages, here in name only, the wheel brings none of its own.
"${1:-python3}" -m venv --without-pip "$folder/runtime"
for has in pyspark-3.5.0 torch-2.10.0 numpy-1.26.4 pandas-2.2.0 pyarrow-14.0.1; do
  info=$(echo "$folder"/runtime/lib/python*/site-packages)/$has.dist-info
  mkdir "$info"
  printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "${has%-*}" "${has##*-}" >"$info/METADATA"
done
"${pip[@]}" --python "$folder/runtime/bin/python" install --dry-run --quiet --report "$folder/report" "$folder"/*.whl
"${1:-python3}" -c "
import json, sys
added = {one['metadata']['name'].lower() for one in json.load(open(sys.argv[1]))['install']}
replaced = added & {'pyspark', 'torch', 'numpy', 'pandas', 'pyarrow'}
assert 'safetensors' in added and not replaced, (added, replaced)
print('beside the packages of a runtime, pip adds', *sorted(added))" "$folder/report"

"${1:-python3}" -m venv --without-pip "$folder/venv"
python="$folder/venv/bin/python"
"${pip[@]}" --python "$python" install --quiet --no-compile -c "$root/constraints.txt" "$folder"/*.whl
cp "$root/scripts/wheel.py" "$folder"
cd "$folder" # nothing of the repository is on the path here
# What the optimising compiler makes does not pay in a JVM that lives for a minute.
export JAVA_TOOL_OPTIONS="${JAVA_TOOL_OPTIONS:-} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
PYTHONPATH="" PYSPARK_PYTHON="$python" "$python" wheel.py

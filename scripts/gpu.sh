#!/usr/bin/env bash
# Runs the tests and the benchmark that want a GPU, prints a table, and leaves the figures in benchmarks/results/gpu.json.
#
#   scripts/gpu.sh                  on this machine: NVIDIA's driver, Python 3.10 or newer, make
#   scripts/gpu.sh docker           in a container: Docker and the NVIDIA Container Toolkit
#   scripts/gpu.sh slurm [OPTION]   in a job; options as of srun, such as --partition=gpu --gpus=4 --time=2:00:00
#
# From the environment:
#   PIP_EXTRA_INDEX_URL   where there is a build of torch for an older driver, such as
#                         https://download.pytorch.org/whl/cu126
#   BENCHMARK             further options of the benchmark, such as --quick
#   IMAGE                 the container's image, one with Python, git, make and apt-get
#   GPU_JSON              another file for the figures
set -euo pipefail
cd "$(dirname "$0")/.."
json=${GPU_JSON:-benchmarks/results/gpu.json}

refuse() {
  echo "scripts/gpu.sh: $*" >&2
  exit 2
}

gpus() { # one a line, or nothing
  command -v nvidia-smi >/dev/null || return 0
  nvidia-smi --list-gpus 2>/dev/null | grep '^GPU ' || true
}

here() {
  [[ $(uname -s) == Linux ]] || refuse "this system is $(uname -s); CUDA wants Linux"
  command -v nvidia-smi >/dev/null || refuse "nvidia-smi is not on the PATH: is NVIDIA's driver installed?
  scripts/gpu.sh docker   runs in a container, scripts/gpu.sh slurm in a job on another machine"
  [[ -n $(gpus) ]] || refuse "nvidia-smi lists no GPU: $(nvidia-smi --list-gpus 2>&1 | head -n 1)"
  command -v make >/dev/null || refuse "make is not on the PATH"
  gpus
  nvidia-smi --query-gpu=driver_version --format=csv,noheader | sort -u | sed 's/^/driver /'

  make setup
  local python=${VENV:-.venv}/bin/python red=0
  # The build that a package index hands out may be one for CPUs, or for a newer driver than this one.
  "$python" -c "
import sys, torch
build = f'torch {torch.__version__}, built for ' + (f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA')
print(build)
torch.cuda.is_available() or sys.exit(f'{build}, sees no GPU here')" ||
    refuse "set PIP_EXTRA_INDEX_URL to an index with a build for this driver, delete ${VENV:-.venv}, and run this again"

  make test-gpu || red=1
  # What was measured before is no result of this run.
  rm -f "$json"
  # shellcheck disable=SC2086 # several options
  "$python" -m benchmarks.gpu --json "$json" ${BENCHMARK:-} || red=1
  if [[ -f $json ]]; then
    echo
    "$python" -c "
import json, sys
from benchmarks.tables import tables
found = json.load(open(sys.argv[1]))
print(', '.join(found['devices']) + ', ' + found['precision'] + '\n\n' + tables(found))" "$json"
    echo "figures: $json"
  fi
  ((red == 0)) || echo "scripts/gpu.sh: something failed, see above" >&2
  exit $red
}

in_docker() {
  local image=${IMAGE:-python:3.11-bookworm}
  command -v docker >/dev/null || refuse "docker is not on the PATH"
  docker info >/dev/null 2>&1 || refuse "Docker does not answer: $(docker info 2>&1 | tail -n 1)"
  docker run --rm --gpus all "$image" nvidia-smi --list-gpus ||
    refuse "a container of $image sees no GPU: is the NVIDIA Container Toolkit installed, and Docker set up for it
  (nvidia-ctk runtime configure --runtime=docker)?"
  mkdir -p benchmarks/results
  # The sources are copied, so that nothing of root's stays in them. The network is for pip and apt-get: the ranks talk
  # over the container's own loopback. NCCL keeps its buffers in /dev/shm, of which a container has 64 MiB by default.
  docker run --rm --init --gpus all --shm-size=8g --ulimit memlock=-1 --ulimit stack=67108864 \
    --env NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    --env PIP_EXTRA_INDEX_URL --env BENCHMARK --env http_proxy --env https_proxy --env no_proxy \
    --env GPU_JSON=/figures/gpu.json --env OWNER="$(id -u):$(id -g)" \
    --volume sparktorch-pip:/root/.cache/pip \
    --volume "$PWD:/source:ro" --volume "$PWD/benchmarks/results:/figures" \
    "$image" bash -c '
      set -euo pipefail
      mkdir /sparktorch
      tar -C /source --exclude="./.venv*" --exclude="./out" --exclude="*/__pycache__" -c . | tar -C /sparktorch -x
      git config --global --add safe.directory /sparktorch
      red=0
      /sparktorch/scripts/gpu.sh || red=$?
      if [[ -f $GPU_JSON ]]; then chown "$OWNER" "$GPU_JSON"; fi
      exit $red'
  echo "on this machine: benchmarks/results/gpu.json"
}

in_slurm() {
  command -v srun >/dev/null || command -v sbatch >/dev/null || refuse "neither srun nor sbatch is on the PATH"
  make setup # here, for nodes often reach no package index
  local job=(--job-name=sparktorch-gpu --nodes=1 --ntasks=1 --gpus=1 --cpus-per-task=8 --time=2:00:00 "$@")
  if command -v srun >/dev/null; then
    exec srun "${job[@]}" scripts/gpu.sh
  fi
  local log=benchmarks/results/gpu.log red=0
  mkdir -p benchmarks/results
  sbatch --wait --output="$log" --wrap=scripts/gpu.sh "${job[@]}" || red=$?
  cat "$log"
  exit $red
}

mode=${1:-here}
shift || true
case $mode in
  here) here ;;
  docker) in_docker ;;
  slurm) in_slurm "$@" ;;
  -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0" ;;
  *) refuse "unknown: $mode. It is docker, slurm, or nothing for this machine" ;;
esac

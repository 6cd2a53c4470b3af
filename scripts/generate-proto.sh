#!/usr/bin/env bash
# Writes the Python stubs of proto/encserve into DIR (default: proto/src) with the pinned old compiler, whose output
# loads under every protobuf runtime from 5.26 on. The compiler lives in a virtual environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-proto/src}
venv=${PROTO_VENV:-.venv-proto}
if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    # grpcio-tools 1.63.2 imports pkg_resources, which setuptools 82 removed.
    "$venv/bin/pip" install --quiet --disable-pip-version-check 'setuptools<82' 'grpcio-tools==1.63.2' 'protobuf<6'
fi
mkdir -p "$out"
# Mapping encserve_proto onto proto/encserve gives the import path encserve_proto.v1 without editing the output;
# the wire packages stay encserve.v1 and encserve.bundle.v1.
"$venv/bin/python" -W ignore -m grpc_tools.protoc -I encserve_proto=proto/encserve \
    --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
    proto/encserve/v1/encoder.proto proto/encserve/bundle/v1/manifest.proto
# A file without services still gets a gRPC module; an empty module helps nobody.
rm -f "$out/encserve_proto/bundle/v1/manifest_pb2_grpc.py"

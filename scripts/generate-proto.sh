#!/usr/bin/env bash
# Writes the Python stubs of proto/encserve into the first folder (default: proto/src), and those of Triton's service
# into the second (default: where they are), with the pinned old compiler, whose output loads under every protobuf
# runtime from 5.26 on. The compiler lives in a virtual environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-proto/src}
triton=server/src/encserve_server/protocols/open_inference/triton
triton_out=${2:-$triton}
venv=${PROTO_VENV:-.venv-proto}
if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    # grpcio-tools 1.63.2 imports pkg_resources, which setuptools 82 removed.
    "$venv/bin/pip" install --quiet --disable-pip-version-check 'setuptools<82' 'grpcio-tools==1.63.2' 'protobuf<6'
fi
mkdir -p "$out" "$triton_out"
# Mapping encserve_proto onto proto/encserve gives the import path encserve_proto.v1 without editing the output;
# the wire packages stay encserve.v1 and encserve.bundle.v1.
"$venv/bin/python" -W ignore -m grpc_tools.protoc -I encserve_proto=proto/encserve \
    --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
    proto/encserve/v1/encoder.proto proto/encserve/bundle/v1/manifest.proto
# A file without services still gets a gRPC module; an empty module helps nobody.
rm -f "$out/encserve_proto/bundle/v1/manifest_pb2_grpc.py"

"$venv/bin/python" -W ignore -m grpc_tools.protoc -I "$triton" --python_out="$triton_out" --pyi_out="$triton_out" \
    "$triton/grpc_service.proto" "$triton/model_config.proto"
# protoc takes modules of the same folder for top-level ones.
sed -i 's/^import model_config_pb2/from encserve_server.protocols.open_inference.triton import model_config_pb2/' \
    "$triton_out"/grpc_service_pb2.py*

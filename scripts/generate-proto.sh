#!/usr/bin/env bash
# Usage: generate-proto.sh [OUT] [TRITON_OUT]
# Writes the Python stubs of proto/encserve into OUT, and the stubs of Triton's service into TRITON_OUT. By default, the
# script replaces the stubs in git. The script runs an old, pinned compiler in a separate virtual environment. The
# compiler's stubs work with all protobuf runtimes from 5.26 on.
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
# Because of -I encserve_proto=proto/encserve, the stubs have the import path encserve_proto.v1. The protobuf packages
# stay encserve.v1 and encserve.bundle.v1.
"$venv/bin/python" -W ignore -m grpc_tools.protoc -I encserve_proto=proto/encserve \
    --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
    proto/encserve/v1/encoder.proto proto/encserve/bundle/v1/manifest.proto
# manifest.proto has no service, so its gRPC module is empty.
rm -f "$out/encserve_proto/bundle/v1/manifest_pb2_grpc.py"

"$venv/bin/python" -W ignore -m grpc_tools.protoc -I "$triton" --python_out="$triton_out" --pyi_out="$triton_out" \
    "$triton/grpc_service.proto" "$triton/model_config.proto"
# protoc imports modules of the same folder as top-level modules.
sed -i 's/^import model_config_pb2/from encserve_server.protocols.open_inference.triton import model_config_pb2/' \
    "$triton_out"/grpc_service_pb2.py*

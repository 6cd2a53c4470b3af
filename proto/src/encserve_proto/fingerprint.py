"""The fingerprint of a bundle. Both the exporter and the server compute it with this module."""

import hashlib
import json
from typing import Any

from google.protobuf import json_format

from encserve_proto.bundle.v1 import manifest_pb2

_FACTS = (
    "encoder",
    "text",
    "pooling",
    "l2_normalize",
    "graph",
    "more_poolings",
    "head",
    "pooling_skips_prompt",
    "prompts",
    "default_prompt_name",
    "dimensions",
    "query",
    "document",
    "multi_vector",
    "sparse",
    "scores",
    "space_id",
)


def to_fields(manifest: manifest_pb2.Manifest) -> dict[str, Any]:
    """Return a manifest in protobuf's JSON form.

    Fields have their names in the .proto file. Fields with their default value are included.
    """
    fields: dict[str, Any] = json_format.MessageToDict(
        manifest, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields


def fingerprint(manifest: manifest_pb2.Manifest) -> str:
    """Return the fingerprint, which identifies the files of a bundle and what the bundle computes.

    It is the first 32 hex digits of a SHA-256. The hash covers compact JSON with sorted keys: the path and SHA-256 of
    each file, and the fields of `_FACTS`. Fields at their default are left out. So a field that is added to the
    manifest later does not change the fingerprints of older bundles.
    """
    fields = json_format.MessageToDict(manifest, preserving_proto_field_name=True)
    facts = {name: fields[name] for name in _FACTS if name in fields}
    facts["files"] = {file.path: file.sha256 for file in manifest.files}
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]

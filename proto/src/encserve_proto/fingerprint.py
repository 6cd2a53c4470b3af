"""What identifies a bundle: the one rule that both the exporter and the server apply to a manifest."""

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
    "space_id",
)


def to_fields(manifest: manifest_pb2.Manifest) -> dict[str, Any]:
    """The manifest in protobuf's JSON form, every field written out under its own name."""
    fields: dict[str, Any] = json_format.MessageToDict(
        manifest, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields


def fingerprint(manifest: manifest_pb2.Manifest) -> str:
    """Identifies what a bundle computes, and from which files: 32 hex digits.

    The beginning of the SHA-256 over the compact JSON, keys sorted, of each file's path and SHA-256 and the manifest's
    facts about what it computes. Fields at their default are left out, so that a field that is added
    to the manifest later changes no fingerprint of a bundle that does not have it.
    """
    fields = json_format.MessageToDict(manifest, preserving_proto_field_name=True)
    facts = {name: fields[name] for name in _FACTS if name in fields}
    facts["files"] = {file.path: file.sha256 for file in manifest.files}
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]

"""Tests of the names of fields and values in errors.

Each protocol has its own names for fields and values. The packages that all protocols share must not contain names
of a protocol.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import encserve_server
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import FieldPath, Naming, RequestField
from encserve_server.protocols.encserve import naming
from encserve_server.protocols.open_inference.requests import NAMING
from encserve_server.protocols.open_inference.triton import grpc_service_pb2 as triton
from encserve_server.types.requests import DataType, OffsetUnit, OutputKind, Task

PACKAGES = ("models", "outputs", "scheduling", "engine")
# Matches the names of fields and of enum values in any protocol.
PROTOCOL_NAMES = re.compile(
    r"(options|parameters|inputs|outputs|texts)(\.|\[)[a-z{\d]|embeddings\.|token_ids"
    r"|(OUTPUT_KIND|TASK|DATA_TYPE|OFFSET_UNIT|DETAIL|TRUNCATION|INSPECT_KIND|POOLING)_|INVALID_ARGUMENT"
)
OF_OUTPUTS = {field for field in RequestField if field.name.startswith("OUTPUT")}
OF_VECTORS = {RequestField.VECTORS, RequestField.VECTORS_WIDTH, RequestField.VECTORS_DATA}
OF_SPANS = {RequestField.SPANS, RequestField.SPAN_UNIT, RequestField.SPAN_ENDS}
OF_SCORES = {RequestField.QUERY, RequestField.TOP_K, RequestField.ACTIVATION}
OF_REPLIES = {RequestField.TOKEN_STRINGS, RequestField.EXCLUDE_SPECIAL_TOKENS}
PLACED = {RequestField.IDS, RequestField.SPAN_ENDS}  # an error about these fields names an id or a span of the input


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the value of each string in a module, except docstrings."""
    tree = ast.parse(source)
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    firsts = [node.body[0] for node in ast.walk(tree) if isinstance(node, owners) and node.body]
    docstrings = {id(first.value) for first in firsts if isinstance(first, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


@pytest.mark.parametrize("package", PACKAGES)
def test_the_core_names_no_fields_or_values_of_a_protocol(package: str) -> None:
    found = [
        f"{path.name}:{line}: {text}"
        for path in sorted((Path(encserve_server.__file__).parent / package).rglob("*.py"))
        for line, text in texts_of(path.read_text())
        if PROTOCOL_NAMES.search(text)
    ]
    assert found == []


def paths(*without: RequestField) -> st.SearchStrategy[FieldPath]:
    """Return a strategy for paths to all fields of a request, except the fields in `without`."""
    numbers = st.none() | st.integers(0, 300)

    def of(field: RequestField) -> st.SearchStrategy[FieldPath]:
        places = numbers if field in PLACED else st.none()
        return st.builds(FieldPath, st.just(field), numbers, places)

    return st.sampled_from([field for field in RequestField if field not in without]).flatmap(of)


def check_path(message: Any, path: str) -> None:
    """Check that every field of a path exists in the message, and that only repeated fields have an index."""
    descriptor = message.DESCRIPTOR
    for step in path.split("."):
        found = re.fullmatch(r"([a-z0-9_]+)(\[\d+\])?", step)
        assert found, path
        name, index = found.groups()
        assert descriptor is not None, path
        assert name in descriptor.fields_by_name, path
        field = descriptor.fields_by_name[name]
        assert index is None or field.is_repeated, path
        descriptor = field.message_type


@given(paths(*OF_SCORES))
def test_the_fields_of_encode(path: FieldPath) -> None:
    check_path(pb.EncodeRequest, naming.ENCODE.field(path))


@given(
    paths(
        *OF_OUTPUTS, *OF_VECTORS, *OF_SPANS, *OF_SCORES, RequestField.IDS, RequestField.DATA_TYPE,
        RequestField.EXCLUDE_SPECIAL_TOKENS, RequestField.FINGERPRINT, RequestField.SPACE_ID,
    )
)  # fmt: skip
def test_the_fields_of_tokenize(path: FieldPath) -> None:
    check_path(pb.TokenizeRequest, naming.TOKENIZE.field(path))


@given(paths(*OF_OUTPUTS, *OF_REPLIES, *OF_SCORES))
def test_the_fields_of_inspect(path: FieldPath) -> None:
    check_path(pb.InspectRequest, naming.INSPECT.field(path))


@given(
    paths(
        *OF_OUTPUTS, *OF_SPANS, *OF_REPLIES, RequestField.IDS, RequestField.DATA_TYPE, RequestField.TASK,
        RequestField.VECTORS_WIDTH, RequestField.VECTORS_DATA,
    ),
    st.sampled_from(sorted(naming.SCORES)),
)  # fmt: skip
def test_the_fields_of_score(path: FieldPath, inputs: str) -> None:
    found = naming.SCORES[inputs].field(path)
    # The error names one document, such as document_vectors[3]. But the field document_vectors is a single tensor, so
    # remove the index.
    check_path(pb.ScoreRequest, re.sub(r"^document_vectors\[\d+\]", "document_vectors", found))


@pytest.mark.parametrize("name", [naming.ENCODE, naming.TOKENIZE, naming.INSPECT, naming.SCORES["pairs"]])
def test_the_values_of_encserve(name: Naming) -> None:
    """In an error, each value has the name of the protobuf value with the same number.

    So the name of `Task.NEITHER` is TASK_UNSPECIFIED.
    """
    enums: dict[Any, Any] = {OutputKind: pb.OutputKind, Task: pb.Task, DataType: pb.DataType, OffsetUnit: pb.OffsetUnit}
    for ours, theirs in enums.items():
        assert {it.value: name.value(it) for it in ours} == {it.value: theirs.Name(it.value) for it in ours}


@given(paths(*OF_SPANS, *OF_REPLIES, RequestField.FINGERPRINT, RequestField.SPACE_ID))
def test_the_fields_of_open_inference(path: FieldPath) -> None:
    """An error of the Open Inference Protocol names a field of ModelInferRequest, a parameter, or a tensor.

    For a tensor, the error names the shape, a row, or an element.
    """
    rendered = NAMING.field(path)
    found = re.fullmatch(r"(?P<name>[a-z_]+)(\.(?P<attribute>[a-z_]+)|\[\d+(, \d+)?\])?", rendered)
    assert found, rendered
    name, attribute = found["name"], found["attribute"]
    if name == "parameters":
        assert attribute in {"task", "prompt_name", "dimensions", "datatype"}
    elif name in {"text", "query", "input_ids", "inputs_embeds"}:
        assert attribute in {None, "shape"}
    else:
        check_path(triton.ModelInferRequest, rendered)


def test_the_values_of_open_inference() -> None:
    """In an error, an output kind has the name of the tensor in the reply.

    Data types and tasks have the names that callers send as values of parameters.
    """
    values = (
        (OutputKind.TOKENS, "last_hidden_state"),
        (OutputKind.MODEL, "embedding"),
        (OutputKind.MULTI_VECTOR, "multi_vector"),
        (OutputKind.SPARSE, "sparse_weights"),
        (DataType.FLOAT32, "FP32"),
        (DataType.FLOAT16, "FP16"),
        (Task.QUERY, "query"),
        (Task.DOCUMENT, "document"),
    )
    for value, name in values:
        assert NAMING.value(value) == name

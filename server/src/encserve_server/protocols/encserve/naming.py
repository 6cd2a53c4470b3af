"""Names of the fields and values of encserve.v1, for error messages."""

from enum import Enum
from typing import Any

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import Naming, RequestField
from encserve_server.types.requests import Activation, DataType, OffsetUnit, OutputKind, Task

_INPUT, _OUTPUT = "inputs{at:[#]}", "options.outputs{at:[#]}"
_ENCODE = {
    RequestField.INPUTS: "inputs",
    RequestField.INPUT: _INPUT,
    RequestField.TEXT: f"{_INPUT}.text",
    RequestField.QUERY: f"{_INPUT}.text",
    RequestField.IDS: _INPUT + ".token_ids{place:.ids[#]}",
    RequestField.VECTORS: f"{_INPUT}.embeddings",
    RequestField.VECTORS_WIDTH: f"{_INPUT}.embeddings.width",
    RequestField.VECTORS_DATA: f"{_INPUT}.embeddings.data",
    RequestField.SPANS: f"{_INPUT}.spans",
    RequestField.SPAN_UNIT: f"{_INPUT}.spans.unit",
    RequestField.SPAN_ENDS: _INPUT + ".spans.ends{place:[#]}",
    RequestField.OUTPUTS: "options.outputs",
    RequestField.OUTPUT: _OUTPUT,
    RequestField.OUTPUT_KIND: f"{_OUTPUT}.kind",
    RequestField.OUTPUT_NORMALIZE: f"{_OUTPUT}.l2_normalize",
    RequestField.OUTPUT_DIMENSIONS: f"{_OUTPUT}.dimensions",
    RequestField.OUTPUT_POOL_FACTOR: f"{_OUTPUT}.pool_factor",
    RequestField.OUTPUT_MAX_ACTIVE_DIMS: f"{_OUTPUT}.max_active_dims",
    RequestField.OUTPUT_SPAN_POOLING: f"{_OUTPUT}.span_pooling",
    RequestField.DATA_TYPE: "options.data_type",
    RequestField.TASK: "options.task",
    RequestField.PROMPT_NAME: "options.prompt_name",
    RequestField.TOKEN_STRINGS: "options.include_token_strings",
    RequestField.EXCLUDE_SPECIAL_TOKENS: "options.exclude_special_tokens",
    RequestField.TOP_K: "top_k",
    RequestField.ACTIVATION: "activation",
    RequestField.MODEL: "model",
    RequestField.MODEL_VERSION: "model_version",
    RequestField.FINGERPRINT: "expected_fingerprint",
    RequestField.SPACE_ID: "expected_space_id",
}
_ENUMS: dict[type[Enum], Any] = {
    Activation: pb.Activation,
    DataType: pb.DataType,
    OffsetUnit: pb.OffsetUnit,
    OutputKind: pb.OutputKind,
    Task: pb.Task,
}
_VALUES = {ours: {it: theirs.Name(it.value) for it in ours} for ours, theirs in _ENUMS.items()}
_PLAIN = {field: name.removeprefix("options.") for field, name in _ENCODE.items()}
_TEXT = "texts{at:[#]}"

ENCODE = Naming(_ENCODE, _VALUES)
TOKENIZE = Naming(_PLAIN | {RequestField.INPUTS: "texts", RequestField.INPUT: _TEXT, RequestField.TEXT: _TEXT}, _VALUES)
INSPECT = Naming(
    {field: name.replace(_INPUT, "input") for field, name in _PLAIN.items()} | {RequestField.INPUTS: "input"}, _VALUES
)


def score_naming(inputs: str) -> Naming:
    """Return the names of fields in a ScoreRequest whose inputs are in the field `inputs`, such as "documents"."""
    one = inputs + "{at:[#]}"
    is_pair = inputs == "pairs"
    names = {
        RequestField.INPUTS: inputs,
        RequestField.INPUT: one,
        RequestField.TEXT: f"{one}.document" if is_pair else one,
        RequestField.QUERY: f"{one}.query" if is_pair else "query",
        RequestField.VECTORS: "document_vectors{at:[#]}",
    }
    return Naming(_PLAIN | names, _VALUES)


SCORES = {inputs: score_naming(inputs) for inputs in ("documents", "document_vectors", "pairs", "texts")}

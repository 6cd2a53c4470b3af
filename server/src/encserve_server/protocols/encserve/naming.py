"""Names of the fields and values of encserve.v1, for error messages."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import FieldPath, Part
from encserve_server.types.requests import DataType, OffsetUnit, OutputKind, Task

_INPUT, _OUTPUT = "inputs[{at}]", "options.outputs[{at}]"
_ENCODE = {
    Part.INPUTS: "inputs",
    Part.INPUT: _INPUT,
    Part.TEXT: f"{_INPUT}.text",
    Part.IDS: f"{_INPUT}.token_ids",
    Part.VECTORS: f"{_INPUT}.embeddings",
    Part.VECTORS_WIDTH: f"{_INPUT}.embeddings.width",
    Part.VECTORS_DATA: f"{_INPUT}.embeddings.data",
    Part.SPANS: f"{_INPUT}.spans",
    Part.SPAN_UNIT: f"{_INPUT}.spans.unit",
    Part.SPAN_ENDS: f"{_INPUT}.spans.ends",
    Part.OUTPUTS: "options.outputs",
    Part.OUTPUT: _OUTPUT,
    Part.OUTPUT_KIND: f"{_OUTPUT}.kind",
    Part.OUTPUT_NORMALIZE: f"{_OUTPUT}.l2_normalize",
    Part.OUTPUT_DIMENSIONS: f"{_OUTPUT}.dimensions",
    Part.OUTPUT_POOL_FACTOR: f"{_OUTPUT}.pool_factor",
    Part.OUTPUT_MAX_ACTIVE_DIMS: f"{_OUTPUT}.max_active_dims",
    Part.OUTPUT_SPAN_POOLING: f"{_OUTPUT}.span_pooling",
    Part.DATA_TYPE: "options.data_type",
    Part.TASK: "options.task",
    Part.PROMPT_NAME: "options.prompt_name",
    Part.TOKEN_STRINGS: "options.include_token_strings",
    Part.EXCLUDE_SPECIAL_TOKENS: "options.exclude_special_tokens",
    Part.MODEL: "model",
    Part.MODEL_VERSION: "model_version",
    Part.FINGERPRINT: "expected_fingerprint",
    Part.SPACE_ID: "expected_space_id",
}
_ENUMS: dict[type[Enum], Any] = {
    DataType: pb.DataType,
    OffsetUnit: pb.OffsetUnit,
    OutputKind: pb.OutputKind,
    Task: pb.Task,
}


class RpcNaming:
    """The names of the fields of one request message."""

    def __init__(self, names: Mapping[Part, str]) -> None:
        """Take a name for each part of the message. `{at}` in a name is the index of the input or output."""
        self._names = names

    def field(self, path: FieldPath) -> str:
        """Return the name of a field, such as `inputs[3].token_ids.ids[17]`."""
        name = self._names[path.part]
        name = name.replace("[{at}]", "" if path.at is None else f"[{path.at}]")
        if path.place is None:
            return name
        return f"{name}.ids[{path.place}]" if path.part is Part.IDS else f"{name}[{path.place}]"

    def value(self, value: Enum) -> str:
        """Return the name of an enum value, such as `TASK_QUERY`."""
        enum = _ENUMS.get(type(value))
        return value.name if enum is None else str(enum.Name(value.value))


_PLAIN = {part: name.removeprefix("options.") for part, name in _ENCODE.items()}
ENCODE = RpcNaming(_ENCODE)
TOKENIZE = RpcNaming(_PLAIN | {Part.INPUTS: "texts", Part.INPUT: "texts[{at}]", Part.TEXT: "texts[{at}]"})
INSPECT = RpcNaming({part: name.replace(_INPUT, "input") for part, name in _PLAIN.items()} | {Part.INPUTS: "input"})

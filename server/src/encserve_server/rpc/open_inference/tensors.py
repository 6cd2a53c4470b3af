"""Tensors as requests bring them, raw or typed, and what a model has for inputs and outputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.errors import InvalidField
from encserve_server.outputs import ModelOutputs
from encserve_server.rpc.open_inference.triton import grpc_service_pb2 as pb
from encserve_server.types.bundles import Bundle
from encserve_server.types.requests import DataType, OutputKind

INPUT_IDS, ATTENTION_MASK, TEXT, INPUTS_EMBEDS = "input_ids", "attention_mask", "text", "inputs_embeds"
# The largest dimension of a tensor; what is larger cannot be in any message, and has no place in NumPy.
_MAX_DIMENSION = 2**31
# Of what callers send so many are looked at for an error's text.
MAX_SHOWN = 8
_BYTES_LENGTH = 4  # bytes in front of each element of BYTES, its length


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What a tensor is, for metadata and checks.

    Attributes:
        name: Its name.
        datatype: As the protocol calls it.
        shape: Its dimensions; -1 for one that varies.
        optional: Whether a request may leave it out.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


class TensorPart(Enum):
    """What an output tensor holds of what a model makes; n sequences, of which the longest has `most` rows."""

    ROWS = "(n, most, width), padded with zeros"
    VECTOR = "(n, width)"
    WEIGHTS = "(n, most), padded with zeros"
    INDICES = "(n, most), padded with zeros, uint32"
    LENGTHS = "(n,) how many rows are no padding, int64"


OUTPUTS: dict[str, tuple[OutputKind, TensorPart]] = {
    "last_hidden_state": (OutputKind.TOKENS, TensorPart.ROWS),
    "lengths": (OutputKind.TOKENS, TensorPart.LENGTHS),
    "embedding": (OutputKind.MODEL, TensorPart.VECTOR),
    "multi_vector": (OutputKind.MULTI_VECTOR, TensorPart.ROWS),
    "multi_vector_lengths": (OutputKind.MULTI_VECTOR, TensorPart.LENGTHS),
    "sparse_weights": (OutputKind.SPARSE, TensorPart.WEIGHTS),
    "sparse_indices": (OutputKind.SPARSE, TensorPart.INDICES),
    "sparse_lengths": (OutputKind.SPARSE, TensorPart.LENGTHS),
}
DATATYPES = {"FP32": DataType.FLOAT32, "FP16": DataType.FLOAT16, "INT8": DataType.INT8}
DATATYPE_NAMES = {data_type: name for name, data_type in DATATYPES.items()}
_PART_DATATYPES = {TensorPart.INDICES: "UINT32", TensorPart.LENGTHS: "INT64"}


def datatype_of(part: TensorPart, data_type: DataType) -> str:
    """The protocol's name for the numbers of an output."""
    return _PART_DATATYPES.get(part) or DATATYPE_NAMES[data_type]


def inputs_of(bundle: Bundle) -> list[TensorKind]:
    """What a model takes. Where there is a tokenizer, texts or ids; never both in one request."""
    mask = TensorKind(ATTENTION_MASK, "INT64", (-1, -1), optional=True)
    if bundle.graph.takes_vectors:
        return [TensorKind(INPUTS_EMBEDS, "FP32", (-1, -1, bundle.d_model)), mask]
    has_text = bundle.tokenizer_file is not None
    ids = [TensorKind(INPUT_IDS, "INT64", (-1, -1), optional=has_text), mask]
    return [*ids, TensorKind(TEXT, "BYTES", (-1,), optional=True)] if has_text else ids


def outputs_of(outputs: ModelOutputs) -> list[TensorKind]:
    """What a model gives, as float32."""
    found = []
    for name, (kind, part) in OUTPUTS.items():
        if kind in outputs.kinds:
            width = outputs.kinds[kind].width
            shapes = {TensorPart.ROWS: (-1, -1, width), TensorPart.VECTOR: (-1, width), TensorPart.LENGTHS: (-1,)}
            found.append(TensorKind(name, datatype_of(part, DataType.FLOAT32), shapes.get(part, (-1, -1))))
    return found


@dataclass(frozen=True, slots=True)
class SentTensor:
    """An input tensor of a request, whose name, datatype and dimensions are those of its kind.

    Attributes:
        name: Its name.
        shape: Its dimensions as they were sent.
        raw: Its bytes, or None where the request brings typed contents.
        contents: Typed contents.
    """

    name: str
    shape: tuple[int, ...]
    raw: bytes | None
    contents: pb.InferTensorContents

    def numbers(self, dtype: str, typed: Sequence[Any]) -> npt.NDArray[Any]:
        """The tensor, of its shape; `typed` are its numbers where it is not raw.

        Raises:
            InvalidField: There are more or fewer than its shape says.
        """
        if self.raw is None:
            self._check_elements(len(typed))
            flat = np.array(typed, dtype)
        elif len(self.raw) % np.dtype(dtype).itemsize:
            size = np.dtype(dtype).itemsize
            raise InvalidField(self.name, f"must be whole numbers of {size} bytes; was {len(self.raw)} bytes")
        else:
            flat = np.frombuffer(self.raw, dtype)
        self._check_elements(len(flat))
        return flat.reshape(self.shape)

    def texts(self) -> list[str]:
        """The elements of a tensor of BYTES.

        Raises:
            InvalidField: There are more or fewer than its shape says, or one is no UTF-8.
        """
        elements = self.contents.bytes_contents if self.raw is None else self._split(self.raw)
        self._check_elements(len(elements))
        texts = []
        for i, element in enumerate(elements):
            try:
                texts.append(element.decode())
            except UnicodeDecodeError as error:
                raise InvalidField(f"{self.name}[{i}]", f"must be UTF-8; is not at byte {error.start}") from None
        return texts

    def _split(self, raw: bytes) -> list[bytes]:
        """The elements, each of which has its length in front; of too many, one more than the shape says."""
        elements: list[bytes] = []
        at, most = 0, math.prod(self.shape)
        while at < len(raw) and len(elements) <= most:
            begin = at + _BYTES_LENGTH
            at = begin + int.from_bytes(raw[at:begin], "little")
            if begin > len(raw) or at > len(raw):
                what = f"element {len(elements)} ends at byte {max(begin, at)} of {len(raw)}"
                raise InvalidField(self.name, f"must be elements with their length in 4 bytes before each; {what}")
            elements.append(raw[begin:at])
        return elements

    def _check_elements(self, count: int) -> None:
        wanted = math.prod(self.shape)
        if count != wanted:
            raise InvalidField(self.name, f"must hold {wanted} elements for its shape {list(self.shape)}; was {count}")


def read_inputs(request: pb.ModelInferRequest, bundle: Bundle) -> dict[str, SentTensor]:
    """The inputs of a request by name; their data are not looked at yet.

    Raises:
        InvalidField: One is not among the model's, is there twice, or has another datatype or number of dimensions; or
            some data are raw and some are not.
    """
    raw: Sequence[bytes] = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidField(
            "raw_input_contents", f"must be one for each of the {len(request.inputs)} inputs, or none; was {len(raw)}"
        )
    known = {it.name: it for it in inputs_of(bundle)}
    found: dict[str, SentTensor] = {}
    for i, it in enumerate(request.inputs):
        if it.name not in known:
            there = ", ".join(known)
            raise InvalidField(f"inputs[{i}].name", f"model {bundle.name} takes {there}; was {it.name[:64]!r}")
        if it.name in found:
            raise InvalidField(f"inputs[{i}].name", f"{it.name} is there twice")
        _check_header(it, known[it.name])
        if raw and it.HasField("contents"):
            raise InvalidField(f"inputs[{i}].contents", "must be empty where raw_input_contents hold the data")
        found[it.name] = SentTensor(it.name, tuple(it.shape), raw[i] if raw else None, it.contents)
    return found


def _check_header(it: pb.ModelInferRequest.InferInputTensor, kind: TensorKind) -> None:
    """Refuses what is not of this kind, whatever its data are."""
    if it.parameters:
        names = ", ".join(sorted(islice(it.parameters, MAX_SHOWN)))[:64]
        raise InvalidField(f"{it.name}.parameters", f"inputs have none here, nor shared memory; was {names}")
    if it.datatype != kind.datatype:
        raise InvalidField(f"{it.name}.datatype", f"must be {kind.datatype}; was {it.datatype[:64]!r}")
    shape = list(it.shape[:MAX_SHOWN])
    wanted = f"must be {list(kind.shape)}, -1 for any number"
    fits = len(shape) == len(kind.shape) and all(want in (-1, got) for got, want in zip(shape, kind.shape, strict=True))
    column = kind.name == TEXT and len(shape) == 2 and shape[1] == 1  # as KServe's clients send it
    if not (fits or column) or not all(0 <= size < _MAX_DIMENSION for size in shape):
        raise InvalidField(f"{it.name}.shape", f"{wanted}; was {shape}")

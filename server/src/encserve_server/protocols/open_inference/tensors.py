"""The tensors of requests, raw or typed, and the inputs and outputs of models."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from encserve_server.errors import InvalidField
from encserve_server.models.inputs import too_many_bytes
from encserve_server.outputs import ModelOutputs
from encserve_server.types.bundles import Bundle
from encserve_server.types.requests import DataType, OutputKind

INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS = "input_ids", "attention_mask", "token_type_ids"
TEXT, QUERY, INPUTS_EMBEDS = "text", "query", "inputs_embeds"
# At most this many dimensions of a shape are stored, because error messages show the shape.
MAX_SHOWN = 8
# The maximum size of a dimension. A message cannot hold a larger tensor, and neither can NumPy.
_MAX_DIMENSION = 2**31
_BYTES_LENGTH = 4  # each element of BYTES begins with its length in this many bytes
# NumPy's dtypes by datatype. BYTES are texts and have no dtype.
DTYPES = {"INT64": "<i8", "INT32": "<i4", "UINT32": "<u4", "FP32": "<f4", "FP16": "<f2", "INT8": "i1"}
# The names of the datatypes in Triton's model configuration.
CONFIG_TYPES = {"BYTES": "TYPE_STRING"} | {datatype: f"TYPE_{datatype}" for datatype in DTYPES}
# Further datatypes that an input may have. Many tools send 32-bit ids.
_ALSO_TAKEN = {"INT64": ("INT32",)}
SHARED_MEMORY = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")
# Parameters of tensors that ask for features that this server lacks. All other parameters only say how data are sent.
CHECKED_PARAMETERS = (*SHARED_MEMORY, "classification", "content_type")


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The description of a tensor, for metadata and checks.

    Attributes:
        name: The name of the tensor.
        datatype: The protocol's name of the datatype.
        shape: The size of each dimension; -1 for a variable size.
        optional: Whether a request may leave out the tensor.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


class TensorPart(Enum):
    """The shape and contents of an output tensor, for n sequences. The longest sequence has `most` rows."""

    ROWS = "(n, most, width), padded with zeros"
    VECTOR = "(n, width)"
    WEIGHTS = "(n, most), padded with zeros"
    INDICES = "(n, most), padded with zeros, uint32"
    LENGTHS = "(n,) number of rows of each sequence without padding, int64"


OUTPUTS: dict[str, tuple[OutputKind, TensorPart]] = {
    "last_hidden_state": (OutputKind.TOKENS, TensorPart.ROWS),
    "lengths": (OutputKind.TOKENS, TensorPart.LENGTHS),
    "embedding": (OutputKind.MODEL, TensorPart.VECTOR),
    "scores": (OutputKind.SCORES, TensorPart.VECTOR),
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
    """Return the protocol's name for the type of an output's numbers."""
    return _PART_DATATYPES.get(part) or DATATYPE_NAMES[data_type]


def inputs_of(bundle: Bundle) -> list[TensorKind]:
    """Return the inputs of a model. With a tokenizer, a request has either texts or ids."""
    mask = TensorKind(ATTENTION_MASK, "INT64", (-1, -1), optional=True)
    if bundle.graph.takes_vectors:
        return [TensorKind(INPUTS_EMBEDS, "FP32", (-1, -1, bundle.d_model)), mask]
    has_text = bundle.tokenizer_file is not None
    ids = [TensorKind(INPUT_IDS, "INT64", (-1, -1), optional=has_text), mask]
    texts = [TEXT] if bundle.scores is None else [TEXT, QUERY]
    return [*ids, *(TensorKind(name, "BYTES", (-1,), optional=True) for name in texts if has_text)]


def outputs_of(outputs: ModelOutputs) -> list[TensorKind]:
    """Return the outputs of a model, as float32."""
    found = []
    for name, (kind, part) in OUTPUTS.items():
        if kind in outputs.kinds:
            width = outputs.kinds[kind].width
            shapes = {TensorPart.ROWS: (-1, -1, width), TensorPart.VECTOR: (-1, width), TensorPart.LENGTHS: (-1,)}
            found.append(TensorKind(name, datatype_of(part, DataType.FLOAT32), shapes.get(part, (-1, -1))))
    return found


class TypedData(Protocol):
    """The elements of a tensor that came as values, not as raw bytes."""

    def __len__(self) -> int:
        """Return the number of elements."""

    def numbers(self, dtype: str) -> npt.NDArray[Any]:
        """Return the elements as an array of numbers, (elements,)."""

    def texts(self) -> Sequence[bytes | str]:
        """Return the elements as texts."""


@dataclass(frozen=True, slots=True)
class SentTensor:
    """An input tensor of a request.

    Attributes:
        name: The name of the tensor.
        datatype: The datatype of the tensor.
        shape: The dimensions in the request, at most the first `MAX_SHOWN`.
        data: The raw bytes, or the elements as values.
        parameters: The parameters of the tensor, but only the names in `CHECKED_PARAMETERS`.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview | TypedData
    parameters: Mapping[str, Any]

    def numbers(self) -> npt.NDArray[Any]:
        """Return the tensor as an array of its shape and datatype.

        Raises:
            InvalidField: The number of elements does not match the shape.
        """
        data, dtype = self.data, np.dtype(DTYPES[self.datatype])
        if not isinstance(data, bytes | memoryview):
            self.check_elements(len(data))
            flat = data.numbers(dtype.str)
        elif len(data) % dtype.itemsize:
            problem = f"must be a multiple of {dtype.itemsize} bytes; was {len(data)} bytes"
            raise InvalidField(self.name, problem)
        else:
            flat = np.frombuffer(data, dtype)
        self.check_elements(len(flat))
        return flat.reshape(self.shape)

    def texts(self, max_text_bytes: int) -> Iterator[str]:
        """Yield the elements of a tensor of BYTES.

        Raises:
            InvalidField: The number of elements does not match the shape, or an element is not UTF-8 or too long.
        """
        data, count = self.data, 0
        if not isinstance(data, bytes | memoryview):
            self.check_elements(len(data))
        elements = self._split(data) if isinstance(data, bytes | memoryview) else data.texts()
        for count, element in enumerate(elements, 1):
            field = f"{self.name}[{count - 1}]"
            if isinstance(element, str):
                yield element
                continue
            if len(element) > max_text_bytes:
                raise too_many_bytes(field, max_text_bytes, len(element))
            try:
                yield str(element, "utf-8")
            except UnicodeDecodeError as error:
                raise InvalidField(field, f"must be UTF-8; byte {error.start} is not valid") from None
        self.check_elements(count)

    def _split(self, raw: bytes | memoryview) -> Iterator[bytes | memoryview]:
        """Yield the elements of raw data, at most one more than the shape has. Each element follows its length."""
        at = count = 0
        most = math.prod(self.shape)
        while at < len(raw) and count <= most:
            begin = at + _BYTES_LENGTH
            at = begin + int.from_bytes(raw[at:begin], "little")
            if begin > len(raw) or at > len(raw):
                what = f"element {count} ends at byte {max(begin, at)} of {len(raw)}"
                raise InvalidField(self.name, f"must have the length of each element in 4 bytes before it; {what}")
            yield raw[begin:at]
            count += 1

    def check_elements(self, count: int) -> None:
        """Check that the shape has `count` elements.

        Raises:
            InvalidField: The shape has another number of elements.
        """
        wanted = math.prod(self.shape)
        if count != wanted:
            raise InvalidField(self.name, f"must hold {wanted} elements for its shape {list(self.shape)}; was {count}")


def check_inputs(sent: Iterable[SentTensor], bundle: Bundle) -> dict[str, SentTensor]:
    """Return the inputs of a request by name, without reading their data.

    Raises:
        InvalidField: The model lacks the input, or the request has it twice. Or its datatype or number of dimensions is
            wrong. Or it asks for a feature that this server lacks.
    """
    told = inputs_of(bundle)
    known = {it.name: it for it in told}
    if INPUT_IDS in known:
        known[TOKEN_TYPE_IDS] = TensorKind(TOKEN_TYPE_IDS, "INT64", (-1, -1), optional=True)
    found: dict[str, SentTensor] = {}
    for i, it in enumerate(sent):
        if it.name not in known:
            there = ", ".join(kind.name for kind in told)
            raise InvalidField(f"inputs[{i}].name", f"model {bundle.name} takes {there}; was {it.name[:64]!r}")
        if it.name in found:
            raise InvalidField(f"inputs[{i}].name", f"must not occur twice; was {it.name}")
        _check_header(it, known[it.name])
        found[it.name] = it
    return found


def _check_header(it: SentTensor, kind: TensorKind) -> None:
    """Refuse an input with a wrong datatype, number of dimensions or encoding."""
    check_parameters(f"{it.name}.parameters", it.parameters)
    if str(it.parameters.get("content_type", "")).lower() == "base64":
        raise InvalidField(f"{it.name}.parameters.content_type", "must not be base64: send the texts as they are")
    datatypes = (kind.datatype, *_ALSO_TAKEN.get(kind.datatype, ()))
    if it.datatype not in datatypes:
        raise InvalidField(f"{it.name}.datatype", f"must be {' or '.join(datatypes)}; was {it.datatype[:64]!r}")
    shape = list(it.shape)
    wanted = f"must be {list(kind.shape)}, where -1 is any number"
    fits = len(shape) == len(kind.shape) and all(want in (-1, got) for got, want in zip(shape, kind.shape, strict=True))
    # Clients of KServe and MLServer send texts as a column.
    column = kind.name in (TEXT, QUERY) and len(shape) == 2 and shape[1] == 1
    if not (fits or column) or not all(0 <= size < _MAX_DIMENSION for size in shape):
        raise InvalidField(f"{it.name}.shape", f"{wanted}; was {shape}")


def check_parameters(field: str, parameters: Mapping[str, Any]) -> None:
    """Refuse parameters of a tensor that ask for features that this server lacks.

    Raises:
        InvalidField: The tensor is in shared memory, or a classification is requested.
    """
    if there := [name for name in SHARED_MEMORY if parameters.get(name) is not None]:
        raise InvalidField(field, f"shared memory is not supported: send the data as bytes; was {', '.join(there)}")
    if parameters.get("classification"):
        raise InvalidField(field, "classification is not supported: outputs are the numbers of the model")

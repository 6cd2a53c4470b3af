"""The data that flows through the server: shapes and dtypes stated, and names that say what has been checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int64]  # (seq,)
Rows = npt.NDArray[np.float32]  # (seq, d_model)
Vectors = npt.NDArray[np.float32]  # (seq, d_model)
ModelInput = TokenIds | Vectors  # one sequence, whichever its model takes; len() is its tokens
Numbers = npt.NDArray[np.float32]
OutputArrays = tuple[npt.NDArray[np.floating[Any]], ...]  # of one sequence, each (rows, d_model), C-contiguous
Mask = npt.NDArray[np.bool_]  # (seq,)


class OutputKind(IntEnum):
    """What one output holds; the values are those of the protobuf enum of the same name."""

    TOKENS = 1
    MEAN = 2
    CLS = 3
    MAX = 4
    MODEL = 5  # as the model was trained to make one vector; see ModelPooling
    LAST_TOKEN = 6
    WEIGHTED_MEAN = 7
    MEAN_SQRT_LENGTH = 8
    MULTI_VECTOR = 9  # a vector for each token that counts in MaxSim
    SPARSE = 10  # weights over the vocabulary


class DataType(IntEnum):
    """The type of the numbers returned; the values are those of the protobuf enum of the same name."""

    FLOAT32 = 1
    FLOAT16 = 2

    @property
    def dtype(self) -> np.dtype[np.floating[Any]]:
        """The type as NumPy has it, little-endian whatever this machine is."""
        return _DTYPES[self]

    @property
    def itemsize(self) -> int:
        """Bytes a number."""
        return self.dtype.itemsize


_DTYPES: dict[DataType, np.dtype[np.floating[Any]]] = {
    DataType.FLOAT32: np.dtype("<f4"),
    DataType.FLOAT16: np.dtype("<f2"),
}


class Output(NamedTuple):
    """One thing to return for every sequence, with every default filled in.

    Attributes:
        kind: What it is.
        l2_normalize: Whether each row is scaled to Euclidean length 1, after it has been cut.
        data_type: The type of its numbers; a float16 beyond its range becomes infinite.
        dimensions: To how many of its first numbers a row is cut; 0 for all.
        skipped_tokens: How many tokens at the beginning OutputKind.MODEL leaves out of pooling: those of a prompt.
    """

    kind: OutputKind
    l2_normalize: bool
    data_type: DataType = DataType.FLOAT32
    dimensions: int = 0
    skipped_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text as the model sees it.

    Attributes:
        ids: (seq,) int64, special tokens included.
        char_starts: (seq,) where each token begins in the text, in code points; 0 for special tokens.
        char_ends: (seq,) where it ends, exclusive.
        special: (seq,) whether the tokenizer added the token around the text.
        original_token_count: The tokens before truncation.
    """

    ids: TokenIds
    char_starts: list[int]
    char_ends: list[int]
    special: Mask
    original_token_count: int


@dataclass(frozen=True, slots=True)
class CheckedSequence:
    """A sequence that passed every check of its model: not empty, not too long, every id in the vocabulary or finite.

    Attributes:
        input: (seq,) int64 ids, or (seq, d_model) float32 vectors, whichever the model takes.
        original_token_count: The tokens before truncation.
        special: (seq,) which tokens are special, or None where nobody asked.
        text: How the text was tokenized, or None if the caller sent something else.
    """

    input: ModelInput
    original_token_count: int
    special: Mask | None = None
    text: TokenizedText | None = None

    @property
    def truncated(self) -> bool:
        """Whether anything was cut off."""
        return self.original_token_count > len(self.input)

    @property
    def token_ids(self) -> list[int] | None:
        """The ids, or None for vectors."""
        return self.input.tolist() if self.input.ndim == 1 else None


@dataclass(frozen=True, slots=True)
class EncodedSequence:
    """What was made of one sequence.

    Attributes:
        outputs: What was wanted of it, in order, each (rows, d_model) of the type that was wanted.
        queue_seconds: How long it waited for its batch to start.
        compute_seconds: How long the model ran on its batch.
    """

    outputs: OutputArrays
    queue_seconds: float
    compute_seconds: float


@dataclass(frozen=True, slots=True)
class BatchSeconds:
    """Where the time of a batch went.

    Attributes:
        collate: Laying out the sequences as one array.
        compute: Running the model.
        split: Looking whether its rows are finite, and making of them what each sequence is wanted for.
    """

    collate: float
    compute: float
    split: float


class ClosedBy(StrEnum):
    """Why a batch took no more sequences."""

    DRAINED = "drained"  # nothing else was pending
    TOKENS = "tokens"  # one more would exceed max_batch_tokens
    SEQUENCES = "sequences"  # max_batch_sequences reached
    PADDING = "padding"  # one more would exceed max_padding_fraction


@dataclass(frozen=True, slots=True)
class Graph:
    """A bundle's ONNX file and its interface.

    Attributes:
        path: The ONNX file.
        input_name: Its input of ids, int64 (batch, seq), or of vectors, float32 (batch, seq, d_model).
        takes_vectors: Whether that is vectors.
        attention_mask_name: Its input of 1 for a token and 0 for padding, int64 (batch, seq).
        output_name: Its output of rows, float32 (batch, seq, d_model).
        pad_token_id: What fills a short sequence; the mask hides it.
        d_model: The width of a row.
        precision: The type it computes in.
        token_type_ids_name: An input that is filled with zeros, int64 (batch, seq); empty where there is none.
        vocab_size: One more than the largest id; 0 where it takes vectors.
    """

    path: Path
    input_name: str
    takes_vectors: bool
    attention_mask_name: str
    output_name: str
    pad_token_id: int
    d_model: int
    precision: str
    token_type_ids_name: str = ""
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class HeadGraph:
    """The ONNX file of what comes after pooling, and its interface.

    Attributes:
        path: The ONNX file.
        input_name: Its input of pooled vectors, float32 (batch, pooled_width).
        output_name: Its output, float32 (batch, width).
        pooled_width: The numbers of a pooled vector.
        width: The numbers of a vector behind it.
    """

    path: Path
    input_name: str
    output_name: str
    pooled_width: int
    width: int


@dataclass(frozen=True, slots=True)
class ModelPooling:
    """How a model was trained to make one vector of a sequence: what OutputKind.MODEL stands for.

    Attributes:
        kinds: The poolings, whose vectors are joined in this order.
        l2_normalize: Whether the vector is scaled to Euclidean length 1, before it is cut.
        width: Its numbers, before it is cut.
        head: What comes between; None for nothing.
        skips_prompt: Whether the tokens of a prompt are left out of pooling.
        dimensions: To how many numbers it is cut where nothing else is asked for; 0 for all.
    """

    kinds: tuple[OutputKind, ...]
    l2_normalize: bool
    width: int
    head: HeadGraph | None = None
    skips_prompt: bool = False
    dimensions: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether it is one pooling over all tokens, and normalising at most."""
        return len(self.kinds) == 1 and self.head is None and not self.skips_prompt

    def output(self, l2_normalize: bool, data_type: DataType, dimensions: int) -> Output:
        """The output that makes this vector, cut to `dimensions` or else its own, then normalised if that is asked."""
        dimensions = dimensions or self.dimensions
        if self.is_plain and not (self.l2_normalize and dimensions):
            return Output(self.kinds[0], self.l2_normalize or l2_normalize, data_type, dimensions)
        return Output(OutputKind.MODEL, l2_normalize, data_type, dimensions)

    def gives_unit_vectors(self, output: Output) -> bool:
        """Whether what `output` makes has length 1 already: being cut takes that away."""
        return output.kind is OutputKind.MODEL and self.l2_normalize and output.dimensions in (0, self.width)


class InspectKind(Enum):
    """What one tensor of an inspection holds; the values are those of the protobuf enum of the same name."""

    ATTENTION_WEIGHTS = 1
    HIDDEN_STATES = 2
    POSITIONS = 3


@dataclass(frozen=True, slots=True)
class InspectGraph:
    """The ONNX file that also gives what happens inside a model.

    Attributes:
        graph: The file and its inputs; its output is the last hidden state.
        names: For each kind its outputs, one for each layer: attention weights (1, heads, seq, seq), hidden states
            (1, seq, d_model), positions (max_sequence_tokens, d_model). A kind that the model does not have is left
            out.
        files: The SHA-256 of each file that it is made of, by path, to be checked before it is loaded.
    """

    graph: Graph
    names: Mapping[InspectKind, tuple[str, ...]]
    files: Mapping[Path, str]


@dataclass(frozen=True, slots=True)
class InspectTensor:
    """One tensor of an inspection.

    Attributes:
        kind: What it holds.
        layers: The layers along its first axis; empty for positions.
        parts: Its numbers, float32: an array for each layer, or one array.
    """

    kind: InspectKind
    layers: tuple[int, ...]
    parts: tuple[Numbers, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return (len(self.layers), *self.parts[0].shape) if self.layers else self.parts[0].shape


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle whose files all have the size and SHA-256 that its manifest names.

    Attributes:
        name: The model's name.
        version: The model's version.
        fingerprint: Identifies the bundle.
        d_model: The width of a row.
        n_layers: The encoder's blocks.
        n_heads: The heads of a block.
        vocab_size: One more than the largest id; 0 where the model takes vectors.
        max_sequence_tokens: The longest sequence.
        special_token_ids: Ids that the tokenizer puts around a text, and the padding id.
        pooling: How the model was trained to make one vector of a sequence, or None where the manifest does not say.
        tokenizer_file: The tokenizer, or None where the model takes ids only.
        graph: The ONNX file and its interface.
        inspect_graph: The ONNX file that gives what happens inside, or None where there is none.
        position: Where a token's place comes from; empty where the manifest does not say.
        parameters: How many numbers the model has, by part.
        prompts: What may be put before a text, by name.
        default_prompt_name: Which of them is where nobody asks for another; empty for none.
        similarity: How vectors are meant to be compared; empty where the manifest does not say.
        space_id: Identifies the vector space; empty where the manifest does not say.
    """

    name: str
    version: str
    fingerprint: str
    d_model: int
    n_layers: int
    n_heads: int
    vocab_size: int
    max_sequence_tokens: int
    special_token_ids: tuple[int, ...]
    pooling: ModelPooling | None
    tokenizer_file: Path | None
    graph: Graph
    inspect_graph: InspectGraph | None
    position: str
    parameters: Mapping[str, int]
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str = ""
    similarity: str = ""
    space_id: str = ""

    @property
    def kinds(self) -> tuple[OutputKind, ...]:
        """What can be made of its rows."""
        absent = {OutputKind.MULTI_VECTOR, OutputKind.SPARSE}
        if self.pooling is None:
            absent.add(OutputKind.MODEL)
        return tuple(kind for kind in OutputKind if kind not in absent)

    def width(self, output: Output) -> int:
        """The numbers of a row of an output."""
        width = self.pooling.width if output.kind is OutputKind.MODEL and self.pooling else self.d_model
        return output.dimensions or width

    def sample(self, length: int, *, last: bool = False) -> ModelInput:
        """A sequence that the model can compute: of its first id or its last, or of vectors of 0 or 1."""
        if self.graph.takes_vectors:
            return np.full((length, self.d_model), float(last), np.float32)
        return np.full(length, self.vocab_size - 1 if last else 0, np.int64)

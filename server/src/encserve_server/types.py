"""The data that flows through the server: shapes and dtypes stated, and names that say what has been checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
OutputRows = npt.NDArray[np.floating[Any] | np.uint8]  # (rows, width), C-contiguous; bits are (rows, bytes)
Mask = npt.NDArray[np.bool_]
TokenSpans = npt.NDArray[np.int64]  # (spans, 2): where each begins and ends, exclusive, among a sequence's tokens


class IndexedRows(NamedTuple):
    """Rows that are not one for each token, or for each sequence.

    Attributes:
        rows: (rows, width), C-contiguous.
        indices: (rows,) little-endian uint32: the token that each comes from, or its place in the vocabulary; None
            where it comes from several.
    """

    rows: OutputRows
    indices: npt.NDArray[np.uint32] | None


OutputArrays = tuple[Any, ...]  # of one sequence, for each of its outputs: OutputRows, or IndexedRows


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
    SPANS = 11  # of each range of the sequence its rows, pooled


class Task(IntEnum):
    """What a text is to a model that treats the two differently; the values are those of the protobuf enum."""

    NEITHER = 0
    QUERY = 1
    DOCUMENT = 2


class DataType(IntEnum):
    """The type of the numbers returned; the values are those of the protobuf enum of the same name."""

    FLOAT32 = 1
    FLOAT16 = 2
    BINARY = 3  # whether a number is more than 0: 8 in a byte

    @property
    def dtype(self) -> np.dtype[np.floating[Any] | np.uint8]:
        """The type as NumPy has it, little-endian whatever this machine is; of BINARY that of the bytes."""
        return _DTYPES[self]

    def row_bytes(self, width: int) -> int:
        """The bytes of a row of so many numbers."""
        return (width * _BITS[self] + 7) // 8


_DTYPES: dict[DataType, np.dtype[np.floating[Any] | np.uint8]] = {
    DataType.FLOAT32: np.dtype("<f4"),
    DataType.FLOAT16: np.dtype("<f2"),
    DataType.BINARY: np.dtype(np.uint8),
}
_BITS = (0, 32, 16, 1)  # of a number, by the types' values


class OffsetUnit(IntEnum):
    """What places in a sequence are counted in; the values are those of the protobuf enum of the same name."""

    CODE_POINTS = 1
    UTF8_BYTES = 2
    TOKENS = 3  # before truncation


class Detail(IntEnum):
    """How much is told of each sequence; the values are those of the protobuf enum of the same name."""

    NONE = 1
    COUNTS = 2
    TOKENS = 3


class Output(NamedTuple):
    """One thing to return for every sequence, with every default filled in.

    Attributes:
        kind: What it is.
        l2_normalize: Whether each row is scaled to Euclidean length 1, after it has been cut.
        data_type: The type of its numbers; a float16 beyond its range becomes infinite.
        dimensions: To how many of its first numbers a row is cut; 0 for all.
        skipped_tokens: How many tokens at the beginning OutputKind.MODEL leaves out of pooling: those of a prompt.
        task: Whose tokens OutputKind.MULTI_VECTOR has a vector for, and whose pooling.
        pool_factor: How many of its vectors become one, after what the model does of this itself; 0 for no pooling.
        max_active_dims: How many weights of OutputKind.SPARSE are kept, the largest ones; 0 for all.
        span_pooling: How OutputKind.SPANS pools: a kind of `models.spans.POOLINGS`; None for MEAN.
    """

    kind: OutputKind
    l2_normalize: bool
    data_type: DataType = DataType.FLOAT32
    dimensions: int = 0
    skipped_tokens: int = 0
    task: Task = Task.NEITHER
    pool_factor: float = 0.0
    max_active_dims: int = 0
    span_pooling: OutputKind | None = None


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text as the model sees it.

    Attributes:
        ids: (seq,) int64, special tokens included.
        char_starts: (seq,) where each token begins in the text, in code points; 0 for special tokens.
        char_ends: (seq,) where it ends, exclusive.
        special: (seq,) whether the tokenizer added the token around the text.
        original_token_count: The tokens before truncation.
        kept_behind: How many of the tokens stood behind those that were cut off; 0 where none were.
    """

    ids: TokenIds
    char_starts: list[int]
    char_ends: list[int]
    special: Mask
    original_token_count: int
    kept_behind: int = 0


@dataclass(frozen=True, slots=True)
class CheckedSequence:
    """A sequence that passed every check of its model: not empty, not too long, every id in the vocabulary or finite.

    Attributes:
        input: (seq,) int64 ids, or (seq, d_model) float32 vectors, whichever the model takes.
        original_token_count: The tokens before truncation.
        special: (seq,) which tokens are special, or None where nobody asked.
        text: How the text was tokenized, or None if the caller sent something else.
        attended: How many of its first tokens all of its tokens see; 0 for all.
        token_spans: What OutputKind.SPANS has rows for; None where nobody asked.
    """

    input: ModelInput
    original_token_count: int
    special: Mask | None = None
    text: TokenizedText | None = None
    attended: int = 0
    token_spans: TokenSpans | None = None

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
    """An ONNX file of what comes after the encoder, or after pooling, and its interface. All of it is float32.

    Attributes:
        path: The ONNX file.
        input_names: Its input of vectors, (…, input_width), and after it that of a mask, (…), where it has one.
        output_name: Its output, (batch, width).
        input_width: The numbers of a vector that goes in.
        width: The numbers of one that comes out.
    """

    path: Path
    input_names: tuple[str, ...]
    output_name: str
    input_width: int
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


@dataclass(frozen=True, slots=True)
class Expansion:
    """Tokens behind the last one of a short text, which have vectors in MaxSim.

    Attributes:
        min_tokens: To how many tokens it is made longer.
        token_id: The token.
        attended: Whether other tokens see it.
    """

    min_tokens: int
    token_id: int
    attended: bool


@dataclass(frozen=True, slots=True)
class TokenPooling:
    """Fewer vectors of many: see `models.token_pooling`.

    Attributes:
        factor: How many vectors become one on average, at least 1.
        protected_tokens: How many vectors at the beginning stay as they are.
        l2_normalize: Whether all vectors are scaled to Euclidean length 1 afterwards.
    """

    factor: float
    protected_tokens: int = 1
    l2_normalize: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class StaticSparse:
    """Sparse weights without a run of the model: for every token that occurs in a text its own.

    Attributes:
        tokenizer_file: A tokenizer of its own.
        weights: (width,) float32, the weight of each token.
        max_tokens: The longest text; 0 for any.
    """

    tokenizer_file: Path
    weights: Numbers
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """How texts of one task are treated.

    Attributes:
        prompt_name: The prompt that is put before them; empty for none.
        max_tokens: The longest.
        expansion: What is put behind a short one.
        skipped_token_ids: Tokens that have no vector in MaxSim.
        kept_token_ids: The only ones that have; empty for all.
        token_pooling: What makes fewer vectors of many.
        static_sparse: What answers OutputKind.SPARSE in place of the model.
    """

    prompt_name: str
    max_tokens: int
    expansion: Expansion | None = None
    skipped_token_ids: tuple[int, ...] = ()
    kept_token_ids: tuple[int, ...] = ()
    token_pooling: TokenPooling | None = None
    static_sparse: StaticSparse | None = None


@dataclass(frozen=True, slots=True)
class MultiVector:
    """What makes of a token's row the vector that MaxSim compares.

    Attributes:
        head: Rows to vectors, each by itself.
        similarity: "maxsim" or "meanmaxsim".
        skips_first_token: Whether the first token has no vector.
    """

    head: HeadGraph
    similarity: str
    skips_first_token: bool


class SparsePooling(Enum):
    """How tokens become one sparse vector; the values are those of the protobuf enum of the same name."""

    MAX = 1
    SUM = 2
    OWN_ID = 3  # every token has one weight, under its own id; the largest where an id stands twice


@dataclass(frozen=True, slots=True)
class Sparse:
    """What makes of rows the weights over the vocabulary.

    Attributes:
        head: Rows and mask to weights, (batch, seq, d_model) to (batch, width); for SparsePooling.OWN_ID (tokens,
            d_model) to (tokens, 1).
        width: The numbers of a vector, zeros included.
        pooling: How it pools.
        skipped_token_ids: Tokens that have no weight, for SparsePooling.OWN_ID.
        max_active_dims: How many of the largest weights are kept; 0 for all.
    """

    head: HeadGraph
    width: int
    pooling: SparsePooling
    skipped_token_ids: tuple[int, ...]
    max_active_dims: int


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
        tasks: How texts of the tasks that the model knows are treated.
        multi_vector: What makes OutputKind.MULTI_VECTOR, or None.
        sparse: What makes OutputKind.SPARSE, or None.
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
    tasks: Mapping[Task, TaskSettings] = field(default_factory=dict)
    multi_vector: MultiVector | None = None
    sparse: Sparse | None = None

    def treatment(self, task: Task) -> TaskSettings:
        """How texts of a task that the model knows, or of neither, are treated."""
        if task is not Task.NEITHER:
            return self.tasks[task]
        document = self.tasks.get(Task.DOCUMENT, TaskSettings("", 0))
        return replace(document, prompt_name=self.default_prompt_name, max_tokens=self.max_sequence_tokens)

    def width_of(self, kind: OutputKind) -> int:
        """The numbers of a row of this kind; 0 where the model has none."""
        if kind is OutputKind.MODEL:
            return self.pooling.width if self.pooling else 0
        if kind is OutputKind.MULTI_VECTOR:
            return self.multi_vector.head.width if self.multi_vector else 0
        if kind is OutputKind.SPARSE:
            return 1 if self.sparse else 0
        return self.d_model

    def width(self, output: Output) -> int:
        """The numbers of a row of an output."""
        return output.dimensions or self.width_of(output.kind)

    def sample(self, length: int, *, last: bool = False) -> ModelInput:
        """A sequence that the model can compute: of its first id or its last, or of vectors of 0 or 1."""
        if self.graph.takes_vectors:
            return np.full((length, self.d_model), float(last), np.float32)
        return np.full(length, self.vocab_size - 1 if last else 0, np.int64)

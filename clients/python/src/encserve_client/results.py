"""What a call returns: frozen dataclasses around NumPy arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from encserve_client.options import Array, InputKind, Kind, Output, OutputKind, Pooling, Task, TrainedKind


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one message's sequences: a part of an `EncodedOutput`.

    Attributes:
        rows: (sum(lengths), d_model), a read-only view on the bytes received.
        lengths: (sequences,) int64, the rows of each.
        indices: (sum(lengths),) uint32: of "multi_vector" the token that each row comes from, of "sparse" its place in
            the vocabulary; None where rows have none.
    """

    rows: Array
    lengths: npt.NDArray[np.int64]
    indices: npt.NDArray[np.uint32] | None = None

    def sparse_vectors(self, width: int) -> "list[SparseVector]":
        """Return one sparse vector of this width per sequence."""
        nothing = np.empty(0, np.uint32)
        return [
            SparseVector(nothing if indices is None else indices, rows[:, 0], width)
            for rows, indices in zip(self.split(), self.split_indices(), strict=True)
        ]

    def split(self) -> list[Array]:
        """Return one (rows, d_model) array per sequence. The arrays are writable views on one copy of `rows`."""
        rows = self.rows.copy()
        return [rows[start:end] for start, end in self._bounds()]

    def split_indices(self) -> "list[npt.NDArray[np.uint32] | None]":
        """Return one writable (rows,) array per sequence, or None if rows have no indices."""
        indices = None if self.indices is None else self.indices.copy()
        return [None if indices is None else indices[start:end] for start, end in self._bounds()]

    def _bounds(self) -> list[tuple[int, int]]:
        ends: list[int] = np.cumsum(self.lengths).tolist()
        return list(zip([0, *ends], ends, strict=False))


@dataclass(frozen=True, eq=False, slots=True)
class SparseVector:
    """A vector of which only what is not 0 is kept.

    Attributes:
        indices: (n,) uint32, ascending: where its numbers stand.
        values: (n,), its numbers.
        width: Its length, zeros included.
    """

    indices: npt.NDArray[np.uint32]
    values: Array
    width: int

    def dense(self) -> Array:
        """(width,), zeros included: an array of its own, which may be written to."""
        vector: Array = np.zeros(self.width, self.values.dtype)
        vector[self.indices] = self.values
        return vector


@dataclass(frozen=True, eq=False)
class EncodedOutput:
    """One output of all inputs.

    Attributes:
        kind: What the rows are; a number where this library has no name for it.
        l2_normalized: Whether they have been scaled to Euclidean length 1; of int8 always, before they were rounded.
        blocks: The rows, in as many parts as there were messages.
        sparse_width: Of "sparse" the length of a vector, zeros included; otherwise 0.
    """

    kind: OutputKind | int
    l2_normalized: bool
    blocks: tuple[Block, ...] = field(repr=False)
    sparse_width: int = 0

    def token_indices(self) -> "list[npt.NDArray[np.uint32] | None]":
        """Of "multi_vector" for each input the places of the tokens that its rows come from, (rows,).

        None where rows come from several: they were pooled.
        """
        return [indices for block in self.blocks for indices in block.split_indices()]

    def sparse_vectors(self) -> list[SparseVector]:
        """Return one vector per input, in order.

        Raises:
            ValueError: The output is of another kind.
        """
        if self.kind != "sparse":
            raise ValueError(f"sparse_vectors: the output must be of kind 'sparse'; is of {self.kind!r}")
        return [vector for block in self.blocks for vector in block.sparse_vectors(self.sparse_width)]

    def arrays(self) -> list[Array]:
        """Return one (rows, d_model) array per input, in order: a row per token, or one row if pooled.

        The arrays of one message share memory.
        """
        return [array for block in self.blocks for array in block.split()]

    def matrix(self) -> Array:
        """Return all rows, one under another: (inputs, d_model) if pooled, (sum of rows, d_model) for tokens."""
        return np.concatenate([block.rows for block in self.blocks])


@dataclass(frozen=True, eq=False, slots=True)
class SequenceInfo:
    """One input as the model saw it, as far as the call's `detail` goes.

    Arrays are (token_count,) unless they say otherwise.

    Attributes:
        token_count: The tokens that the model saw, special tokens included.
        original_token_count: The tokens before truncation.
        truncated: Whether anything was cut off.
        token_ids: int64 ids, special tokens included. For text, with detail "tokens"; None for token ids, which the
            caller has, except from `inspect`; None for vectors, which have none.
        offsets: (token_count, 2) int64: where each token begins and ends (exclusive) in the text, in code points or as
            `offset_unit` says; (0, 0) for special tokens. For text; otherwise None.
        special: bool, which tokens are special. For text, and for token ids with `exclude_special_tokens`; otherwise
            None.
        tokens: The vocabulary's strings, where they were asked for; otherwise None.
        span_token_counts: Of "spans" for each range the tokens that its row was pooled from; otherwise None. (ranges,)
    """

    token_count: int
    original_token_count: int
    truncated: bool
    token_ids: npt.NDArray[np.int64] | None
    offsets: npt.NDArray[np.int64] | None
    special: npt.NDArray[np.bool_] | None
    tokens: tuple[str, ...] | None
    span_token_counts: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a call's time went, in seconds. The server's parts are the longest among the call's messages.

    Attributes:
        tokenize_seconds: From a message's arrival until its texts were tokenized.
        queue_seconds: The longest wait of a sequence for its batch to start.
        compute_seconds: The longest model run.
        total_seconds: The whole call as its caller saw it, retries and their waits included.
        messages: How many messages the call was cut into.
        attempts: How many messages were sent, those sent again included.
    """

    tokenize_seconds: float
    queue_seconds: float
    compute_seconds: float
    total_seconds: float
    messages: int
    attempts: int


@dataclass(frozen=True, eq=False)
class EncodeResult:
    """Everything about one call.

    Attributes:
        model: The name of the model that ran.
        version: Its version.
        fingerprint: Identifies the bundle.
        outputs: One for each output asked for, in that order.
        sequences: One for each input, in order.
        timings: Where the time went.
        space_id: Identifies the vector space: never mix vectors of different ones in one index. Empty where the server
            does not say.
    """

    model: str
    version: str
    fingerprint: str
    outputs: tuple[EncodedOutput, ...]
    sequences: Sequence[SequenceInfo]
    timings: Timings
    space_id: str = ""


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """How a model treats texts of one task.

    Attributes:
        prompt_name: The one of `ModelInfo.prompts` that is put before them; empty for none.
        max_tokens: The longest, special tokens and prompt included.
        min_tokens: To how many tokens a shorter one is made longer; 0 for none.
    """

    prompt_name: str
    max_tokens: int
    min_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A loaded model and the limits on what may be sent to it.

    Attributes:
        name: The model's name.
        version: Its version.
        fingerprint: Identifies the bundle.
        is_default: Whether calls that name no model get this one.
        d_model: The numbers in a row.
        n_layers: The encoder's blocks; 0 where they are not known, of a model that came as ONNX.
        n_heads: The attention heads of a block; 0 where they are not known.
        vocab_size: One more than the largest token id; 0 for a model of vectors.
        max_sequence_tokens: The longest sequence in tokens, special tokens included.
        has_tokenizer: Whether text is accepted.
        special_token_ids: The ids that the tokenizer puts around a text, and the padding id.
        pooling: The pooling that the model was trained for; None where it is not known, "model" where it is more than
            one pooling, or something comes between it and normalising. A number where this library has no name for it.
        l2_normalize: Whether it was trained with pooled vectors of length 1.
        provider: The ONNX Runtime execution provider that it really runs on, or "OpenVINO".
        precision: The type that it computes in.
        max_request_sequences: The most inputs of one message. The client cuts larger calls up.
        max_request_tokens: The most tokens of one message. The client cuts larger calls up.
        max_text_bytes: The longest text, in bytes of UTF-8.
        max_request_bytes: The largest request, in bytes. The client cuts larger calls up.
        max_response_bytes: The largest response, in bytes. As above.
        ready: Whether the model answers now.
        not_ready_reason: Why not; empty where ready.
        input_kind: What inputs are made of: token ids (and text), or one vector per token. A number where this library
            has no name for it.
        can_inspect: Whether `inspect` answers for it.
        max_inspect_tokens: The longest sequence that `inspect` takes; 0 where it does not answer.
        position: Where a token's place comes from: "sinusoidal", "learned", "rotary" or "none"; empty where it is not
            known.
        parameters: How many numbers it has, by part.
        vector_width: The numbers of a vector of "model" pooling that is not cut; 0 where the pooling is not known.
        default_dimensions: To how many of them it is cut unless a call says otherwise; 0 for all.
        prompts: The texts that may be put before a text, by name.
        default_prompt_name: The one that is unless a call says otherwise; empty for none.
        similarity: How its vectors are meant to be compared: "cosine", "dot", "euclidean" or "manhattan"; empty where
            that is not known.
        space_id: Identifies the vector space: keep it with an index of its vectors. Empty where it is not known.
        tasks: Those that it treats differently, if any.
        multi_vector_width: The numbers of a vector of "multi_vector"; 0 where it has none.
        multi_vector_similarity: How sets of them are compared: "maxsim" or "meanmaxsim"; empty without them.
        sparse_width: The length of a "sparse" vector, zeros included; 0 where it has none.
        max_outputs: The most outputs of one call; 0 from a server that does not say. `run` refuses more before it sends
            an input.
    """

    name: str
    version: str
    fingerprint: str
    is_default: bool
    d_model: int
    n_layers: int
    n_heads: int
    vocab_size: int
    max_sequence_tokens: int
    has_tokenizer: bool
    special_token_ids: tuple[int, ...]
    pooling: Pooling | int | None
    l2_normalize: bool
    provider: str
    precision: str
    max_request_sequences: int
    max_request_tokens: int
    max_text_bytes: int
    max_request_bytes: int
    max_response_bytes: int
    ready: bool
    not_ready_reason: str
    input_kind: InputKind | int = "token_ids"
    can_inspect: bool = False
    max_inspect_tokens: int = 0
    position: str = ""
    parameters: Mapping[str, int] = field(default_factory=dict, hash=False)
    vector_width: int = 0
    default_dimensions: int = 0
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)
    default_prompt_name: str = ""
    similarity: str = ""
    space_id: str = ""
    tasks: Mapping[Task, TaskInfo] = field(default_factory=dict, hash=False)
    multi_vector_width: int = 0
    multi_vector_similarity: str = ""
    sparse_width: int = 0
    max_outputs: int = 0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of `embed` that the model was trained for."""
        has: dict[Kind, bool] = {
            "vector": self.pooling is not None,
            "multi_vector": bool(self.multi_vector_width),
            "sparse": bool(self.sparse_width),
        }
        return tuple(kind for kind, is_there in has.items() if is_there)

    @property
    def trained_kind(self) -> TrainedKind:
        """What it was trained to make of a text: the first that it has of "model", "multi_vector" and "sparse"."""
        if self.pooling is None and self.multi_vector_width:
            return "multi_vector"
        return "sparse" if self.pooling is None and self.sparse_width else "model"

    def width(self, output: Output) -> int:
        """The numbers of a row of an output."""
        if output.kind == "sparse":
            return 1
        if output.kind == "multi_vector":
            return output.dimensions or self.multi_vector_width or self.d_model
        if output.kind != "model":
            return output.dimensions or self.d_model
        return output.dimensions or self.default_dimensions or self.vector_width or self.d_model


@dataclass(frozen=True, eq=False, slots=True)
class InspectResult:
    """Attention weights and hidden states of one input.

    Attributes:
        model: The name of the model that ran.
        version: Its version.
        fingerprint: Identifies the bundle.
        sequence: What the model saw, with `tokens` where it has a tokenizer.
        attention: (layers, n_heads, seq, seq): how much the token of the row attends to the token of the column; every
            row sums to 1. None if it was not asked for.
        attention_layers: The blocks along the first axis of `attention`, from 0.
        hidden_states: (layers, seq, d_model): the tokens' rows at each depth. None if they were not asked for.
        hidden_state_layers: The depths along the first axis of `hidden_states`: 0 is what enters the first block, i
            what leaves block i - 1; the last, n_layers, is what `token_vectors` returns.
        positions: (max_sequence_tokens, d_model): what the model adds to a token for its place, for every place. None
            if it was not asked for.
        timings: Where the time went.
        space_id: Identifies the vector space.
    """

    model: str
    version: str
    fingerprint: str
    sequence: SequenceInfo
    attention: Array | None = field(repr=False)
    attention_layers: tuple[int, ...]
    hidden_states: Array | None = field(repr=False)
    hidden_state_layers: tuple[int, ...]
    positions: Array | None = field(repr=False)
    timings: Timings
    space_id: str = ""

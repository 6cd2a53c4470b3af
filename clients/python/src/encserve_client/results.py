"""The results of calls: frozen dataclasses with NumPy arrays."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from encserve_client.exceptions import EncserveError
from encserve_client.options import Array, InputKind, Kind, Output, OutputKind, Pooling, Task, TrainedKind


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of all inputs of one message: a part of an `EncodedOutput`.

    Attributes:
        rows: (sum(lengths), d_model), a read-only view on the bytes received.
        lengths: (inputs,) int64, the number of rows of each input.
        indices: (sum(lengths),) uint32, or None. For "multi_vector": the index of the row's token in the input. For
            "sparse": the index of the row's entry in the vocabulary.
    """

    rows: Array
    lengths: npt.NDArray[np.int64]
    indices: npt.NDArray[np.uint32] | None = None

    def of_input(self, index: int) -> "Block":
        """Return the rows of one input. `index` is the index of the input in the block."""
        start = int(self.lengths[:index].sum())
        end = start + int(self.lengths[index])
        indices = None if self.indices is None else self.indices[start:end]
        return Block(self.rows[start:end], self.lengths[index : index + 1], indices)

    def sparse_vectors(self, width: int) -> "list[SparseVector]":
        """Return one sparse vector per input. `width` is the length of a vector, zeros included."""
        no_indices = np.empty(0, np.uint32)
        return [
            SparseVector(no_indices if indices is None else indices, rows[:, 0], width)
            for rows, indices in zip(self.split(), self.split_indices(), strict=True)
        ]

    def split(self) -> list[Array]:
        """Return one (rows, d_model) array per input. The arrays are writable views on one copy of `rows`."""
        rows = self.rows.copy()
        return [rows[start:end] for start, end in self._bounds()]

    def split_indices(self) -> "list[npt.NDArray[np.uint32] | None]":
        """Return one writable (rows,) array per input; None for each input if the block has no indices."""
        indices = None if self.indices is None else self.indices.copy()
        return [None if indices is None else indices[start:end] for start, end in self._bounds()]

    def _bounds(self) -> list[tuple[int, int]]:
        ends: list[int] = np.cumsum(self.lengths).tolist()
        return list(zip([0, *ends], ends, strict=False))


@dataclass(frozen=True, eq=False, slots=True)
class SparseVector:
    """A sparse vector: only the numbers that are not 0.

    Attributes:
        indices: (n,) uint32, ascending: the indices of the values.
        values: (n,), the numbers that are not 0.
        width: The length of the vector, zeros included.
    """

    indices: npt.NDArray[np.uint32]
    values: Array
    width: int

    def dense(self) -> Array:
        """Return a new (width,) array with the zeros."""
        vector: Array = np.zeros(self.width, self.values.dtype)
        vector[self.indices] = self.values
        return vector


@dataclass(frozen=True, eq=False)
class EncodedOutput:
    """One output of all inputs.

    If an input failed, a method that returns the outputs of all inputs raises the error of the first failed input.

    Attributes:
        kind: The kind of the rows; a number if this library has no name for the kind.
        l2_normalized: Whether the rows were scaled to Euclidean length 1. Always True for int8: the rows are scaled
            before rounding.
        blocks: The rows, in the order of the inputs: one block per message. A failed input has no rows.
        sparse_width: For "sparse": the length of a vector, zeros included. Otherwise 0.
        errors: The error of each failed input, by index.
    """

    kind: OutputKind | int
    l2_normalized: bool
    blocks: tuple[Block, ...] = field(repr=False)
    sparse_width: int = 0
    errors: Mapping[int, EncserveError] = field(default_factory=dict)

    def token_indices(self) -> "list[npt.NDArray[np.uint32] | None]":
        """For "multi_vector": return one (rows,) array per input, with the index of each row's token.

        None for an input with merged vectors, because a merged vector has several tokens.

        Raises:
            EncserveError: An input failed.
        """
        self._check_complete()
        return [indices for block in self.blocks for indices in block.split_indices()]

    def sparse_vectors(self) -> list[SparseVector]:
        """Return one vector per input, in order.

        Raises:
            EncserveError: An input failed.
            ValueError: The output has another kind.
        """
        self._check_sparse()
        self._check_complete()
        return [vector for block in self.blocks for vector in block.sparse_vectors(self.sparse_width)]

    def arrays(self) -> list[Array]:
        """Return one (rows, d_model) array per input, in order: one row per token, or one row if pooled.

        The arrays of one message share memory.

        Raises:
            EncserveError: An input failed.
        """
        self._check_complete()
        return [array for block in self.blocks for array in block.split()]

    def matrix(self) -> Array:
        """Return the rows of all inputs: (inputs, d_model) if pooled, otherwise (all rows, d_model).

        Raises:
            EncserveError: An input failed.
        """
        self._check_complete()
        return np.concatenate([block.rows for block in self.blocks])

    def array(self, index: int) -> Array:
        """Return the (rows, d_model) array of one input: one row per token, or one row if pooled.

        Raises:
            EncserveError: The input failed.
            IndexError: No input has this index.
        """
        return self._block_of(index).split()[0]

    def sparse_vector(self, index: int) -> SparseVector:
        """Return the vector of one input.

        Raises:
            EncserveError: The input failed.
            IndexError: No input has this index.
            ValueError: The output has another kind.
        """
        self._check_sparse()
        return self._block_of(index).sparse_vectors(self.sparse_width)[0]

    def _block_of(self, index: int) -> Block:
        if (error := self.errors.get(index)) is not None:
            raise error.with_traceback(None)  # otherwise each raise would add frames to the stored error
        starts = self._starts
        if not 0 <= index < starts[-1]:
            raise IndexError(f"index must be from 0 to {starts[-1] - 1}; was {index}")
        place = bisect_right(starts, index) - 1
        return self.blocks[place].of_input(index - starts[place])

    @cached_property
    def _starts(self) -> list[int]:
        """The index of the first input of each block, and the number of inputs."""
        return list(accumulate((len(block.lengths) for block in self.blocks), initial=0))

    def _check_complete(self) -> None:
        for error in self.errors.values():
            raise error.with_traceback(None)

    def _check_sparse(self) -> None:
        if self.kind != "sparse":
            raise ValueError(f"the kind of the output must be 'sparse'; was {self.kind!r}")


@dataclass(frozen=True, eq=False, slots=True)
class SequenceInfo:
    """The tokens of one input. The call's `detail` decides which attributes are set.

    The shape of arrays is (token_count,), unless another shape is given.

    Attributes:
        token_count: Number of tokens in the model's input, special tokens included.
        original_token_count: Number of tokens before truncation.
        truncated: Whether tokens were cut off.
        token_ids: int64 ids, special tokens included. With detail "tokens", the ids are set for texts. `inspect` sets
            the ids for texts and for token ids. Otherwise None.
        offsets: (token_count, 2) int64: start and end (exclusive) of each token in the text, in the call's
            `offset_unit`; (0, 0) for special tokens. Set for texts. Otherwise None.
        special: bool, True for special tokens. Set for texts, and for token ids with `exclude_special_tokens`.
            Otherwise None.
        tokens: The strings of the tokens in the vocabulary, if the call asked for strings. Otherwise None.
        span_token_counts: (ranges,) int64. For "spans": the number of tokens in each range. Otherwise None.
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
    """The durations of a call, in seconds. The server's durations are the maximum over the call's messages.

    Attributes:
        tokenize_seconds: Time from the arrival of a message until its texts were tokenized.
        queue_seconds: Longest time that an input was in the queue.
        compute_seconds: Longest time that the model computed a batch.
        total_seconds: Time of the whole call on the client's side, retries and waits included.
        messages: Number of messages of the call.
        attempts: Number of sent messages, repeated messages included.
    """

    tokenize_seconds: float
    queue_seconds: float
    compute_seconds: float
    total_seconds: float
    messages: int
    attempts: int


@dataclass(frozen=True, eq=False)
class EncodeResult:
    """The result of `run`.

    Attributes:
        model: The name of the model.
        version: The version of the model.
        fingerprint: The id of the bundle.
        outputs: The outputs, in the order of the request.
        sequences: The tokens of each input, in order. A failed input has `token_count` 0.
        timings: The durations of the call.
        space_id: The id of the vector space. Never mix vectors of different spaces in one index. "" if unknown.
        errors: The error of each failed input, by index, in order. Empty if all inputs succeeded.
    """

    model: str
    version: str
    fingerprint: str
    outputs: tuple[EncodedOutput, ...]
    sequences: Sequence[SequenceInfo]
    timings: Timings
    space_id: str = ""
    errors: Mapping[int, EncserveError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """The prompt of one task, and the limits for texts of this task.

    Attributes:
        prompt_name: The prompt before each text: a name in `ModelInfo.prompts`, or "" for no prompt.
        max_tokens: The largest number of tokens of a text, special tokens and prompt included.
        min_tokens: The number of tokens to which a shorter text is padded; 0 for no padding.
    """

    prompt_name: str
    max_tokens: int
    min_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A loaded model, and the limits of its requests.

    Attributes:
        name: The name of the model.
        version: The version of the model.
        fingerprint: The id of the bundle.
        is_default: Whether a call without a model name uses this model.
        d_model: The width of a row.
        n_layers: The number of blocks of the encoder; 0 if unknown, for example for an imported ONNX file.
        n_heads: The number of attention heads of a block; 0 if unknown.
        vocab_size: The largest token id plus 1; 0 for a model that takes vectors.
        max_sequence_tokens: The largest number of tokens of an input, special tokens included.
        has_tokenizer: Whether the model takes texts.
        special_token_ids: The ids that the tokenizer puts around a text, and the padding id.
        pooling: The pooling that the model was trained for. None if unknown. "model" if the model combines several
            poolings, or has a layer between pooling and normalisation. An int if this library has no name for the
            pooling.
        l2_normalize: Whether the model was trained with pooled vectors of Euclidean length 1.
        provider: The ONNX Runtime execution provider in use, or "OpenVINO".
        precision: The type of the model's computations.
        max_request_sequences: The largest number of inputs in one message. The client splits larger calls.
        max_request_tokens: The largest number of tokens in one message. The client splits larger calls.
        max_text_bytes: The largest size of a text, in bytes of UTF-8.
        max_request_bytes: The largest size of a request, in bytes. The client splits larger calls.
        max_response_bytes: The largest size of a reply, in bytes. If a reply would be larger, the client splits the
            message.
        ready: Whether the model answers calls now.
        not_ready_reason: The reason if the model is not ready; otherwise "".
        input_kind: "token_ids" for a model that takes token ids and texts, "embeddings" for one vector per token. A
            number if this library has no name for the kind.
        can_inspect: Whether the model supports `inspect`.
        max_inspect_tokens: The largest number of tokens of an input of `inspect`; 0 without `inspect`.
        position: The position encoding: "sinusoidal", "learned", "rotary" or "none"; "" if unknown.
        parameters: The number of parameters of each part of the model.
        vector_width: The width of the output "model" before `dimensions` cuts the vector; 0 if the pooling is
            unknown.
        default_dimensions: The default of `dimensions` for the output "model"; 0 means no cut.
        prompts: The texts that may come before an input, by name.
        default_prompt_name: The default of `prompt_name`; "" for no prompt.
        similarity: The similarity that the model was trained for: "cosine", "dot", "euclidean" or "manhattan"; "" if
            unknown.
        space_id: The id of the vector space. Store the id with an index of the vectors. "" if unknown.
        tasks: The tasks that the model treats differently, with the settings of each.
        multi_vector_width: The width of a vector of "multi_vector"; 0 without "multi_vector".
        multi_vector_similarity: "maxsim" or "meanmaxsim"; "" without "multi_vector".
        sparse_width: The length of a "sparse" vector, zeros included; 0 without "sparse".
        max_outputs: The largest number of outputs of one call; 0 if unknown. `run` refuses more outputs before any
            input is sent.
        score_method: How `rank` and `score` compute scores. "labels": by a cross-encoder or a classifier. "vectors",
            "multi_vectors" or "sparse": by the similarity of vectors. "" if the model computes no scores.
        labels: The names of the labels, in the order of the scores; empty unless `score_method` is "labels".
        activation: The function that turns logits into scores: "none", "sigmoid" or "softmax"; "" unless `score_method`
            is "labels".
        takes_pairs_only: Whether the model refuses single texts in `classify`.
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
    score_method: str = ""
    labels: tuple[str, ...] = ()
    activation: str = ""
    takes_pairs_only: bool = False

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of `embed` that the model was trained for."""
        supported: dict[Kind, bool] = {
            "vector": self.pooling is not None,
            "multi_vector": bool(self.multi_vector_width),
            "sparse": bool(self.sparse_width),
        }
        return tuple(kind for kind, is_supported in supported.items() if is_supported)

    @property
    def trained_kind(self) -> TrainedKind:
        """The output that the model was trained for: the first available of "model", "multi_vector" and "sparse"."""
        kind = self.kinds[0] if self.kinds else "vector"
        return "model" if kind == "vector" else kind

    def width(self, output: Output) -> int:
        """Return the width of a row of an output."""
        if output.kind == "sparse":
            return 1
        if output.kind == "multi_vector":
            return output.dimensions or self.multi_vector_width or self.d_model
        if output.kind != "model":
            return output.dimensions or self.d_model
        return output.dimensions or self.default_dimensions or self.vector_width or self.d_model


@dataclass(frozen=True, eq=False, slots=True)
class Classification:
    """The scores of one text.

    Attributes:
        label: The label with the largest score.
        score: The largest score.
        scores: (labels,) float32, the score of each label.
        labels: The names of the labels.
    """

    label: str
    score: float
    scores: Array = field(repr=False)
    labels: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, eq=False, slots=True)
class InspectResult:
    """Attention weights and hidden states of one input.

    Attributes:
        model: The name of the model.
        version: The version of the model.
        fingerprint: The id of the bundle.
        sequence: The tokens of the input. `sequence.tokens` is set if the model has a tokenizer.
        attention: (layers, n_heads, seq, seq): the attention of each row's token to each column's token. Every row
            sums to 1. None if the call did not ask for attention.
        attention_layers: The index of each block along the first axis of `attention`. The first block of the model has
            the index 0.
        hidden_states: (layers, seq, d_model): one row per token at each depth. None if the call did not ask for
            hidden states.
        hidden_state_layers: The depths along the first axis of `hidden_states`. Depth 0 is the input of the first
            block, and depth i the output of block i - 1. The last depth, n_layers, has the rows of `token_vectors`.
        positions: (max_sequence_tokens, d_model): the position vector of every position. None if the call did not ask
            for position vectors.
        timings: The durations of the call.
        space_id: The id of the vector space; "" if unknown.
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

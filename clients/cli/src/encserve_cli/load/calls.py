"""The calls to make, serialised beforehand, and what a right answer to one of them is."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from google.protobuf.message import DecodeError

from encserve_client import DType, ModelInfo, Pooling, ProtocolError
from encserve_proto.v1 import encoder_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What every call asks for.

    Attributes:
        sequences_per_call: Sequences in a call; what is left over at the end is left out.
        pooling: How tokens' rows become one; None for one row per token.
        kind: What is wanted in place of these rows: vectors for MaxSim, or weights over the vocabulary.
        dtype: The type of the numbers.
        truncate: Whether the end of a text that is too long is cut off; otherwise it is an error.
        model: The model's name. Default: the server's default model.
        version: Its version. Default: the model's default version.
    """

    sequences_per_call: int = 1
    pooling: Pooling | None = None
    kind: Literal["rows", "multi_vector", "sparse"] = "rows"
    dtype: DType = "float32"
    truncate: bool = False
    model: str | None = None
    version: str | None = None

    def template(self) -> pb.EncodeRequest:
        """Everything that is sent but the inputs."""
        kind = {None: "TOKENS", "model": "MODEL_POOLING"}.get(self.pooling) or str(self.pooling).upper()
        if self.kind != "rows":
            kind = self.kind.upper()
        options = pb.EncodeOptions(
            outputs=[pb.OutputSpec(kind=f"OUTPUT_KIND_{kind}")],
            data_type=f"DATA_TYPE_{self.dtype.upper()}",
            truncation=pb.TRUNCATION_END if self.truncate else pb.TRUNCATION_REFUSE,
        )
        return pb.EncodeRequest(model=self.model or "", model_version=self.version or "", options=options)


@dataclass(frozen=True, slots=True)
class Expected:
    """What all answers of one workload have in common.

    Attributes:
        fingerprint: The model that must have answered.
        width: Numbers in a row.
        dtype: Their type.
        rows: How many a sequence has: one per token, a single one, or whatever the model makes of it.
    """

    fingerprint: str
    width: int
    dtype: DType = "float32"
    rows: Literal["each token", "one", "any"] = "each token"


@dataclass(frozen=True, slots=True)
class Call:
    """One request to Encode.

    Attributes:
        data: The EncodeRequest, serialised.
        sequences: How many sequences it holds.
        tokens: How many tokens they have together; 0 for texts, whose tokens only the server can count.
        lengths: The tokens of each sequence; empty for texts.
        expected: What is known of the answer beforehand.
    """

    data: bytes
    sequences: int
    tokens: int
    lengths: tuple[int, ...]
    expected: Expected

    def check(self, answer: bytes) -> int:
        """Reads an answer and counts its tokens.

        Raises:
            ProtocolError: It is no EncodeResponse, another model's, or its lengths, bytes or numbers are not those
                that were asked for.
        """
        try:
            response = pb.EncodeResponse.FromString(answer)
        except DecodeError as error:
            raise ProtocolError(f"the answer is no EncodeResponse: {error}") from error
        expected = self.expected
        if response.fingerprint != expected.fingerprint:
            raise ProtocolError(f"the model is {response.fingerprint}; wanted {expected.fingerprint}")
        lengths = tuple(info.token_count for info in response.sequences)
        if len(lengths) != self.sequences or (self.lengths and lengths != self.lengths):
            raise ProtocolError(f"the sequences have {lengths} tokens; wanted {self.lengths or self.sequences}")
        if len(response.outputs) != 1:
            raise ProtocolError(f"the answer must have 1 output; had {len(response.outputs)}")
        tensor = response.outputs[0]
        had = tuple(tensor.lengths)
        rows = {"each token": lengths, "one": (1,) * self.sequences, "any": had}[expected.rows]
        if had != rows or len(had) != self.sequences or tensor.width != expected.width:
            shape = f"{had} rows of {tensor.width}"
            raise ProtocolError(f"the sequences have {shape}; wanted {rows} of {expected.width}")
        dtype = np.dtype("<f2" if expected.dtype == "float16" else "<f4")
        n_bytes = sum(rows) * expected.width * dtype.itemsize
        if tensor.data_type != pb.DataType.Value(f"DATA_TYPE_{expected.dtype.upper()}") or len(tensor.data) != n_bytes:
            raise ProtocolError(f"the rows have {len(tensor.data)} bytes; wanted {n_bytes} of {expected.dtype}")
        if not np.isfinite(np.frombuffer(tensor.data, dtype)).all():
            raise ProtocolError("a number of the answer is not finite")
        return sum(lengths)


def make_calls(lengths: Sequence[int], info: ModelInfo, request: Request = Request(), *, seed: int = 0) -> list[Call]:
    """Calls of random sequences of these lengths, in their order.

    Ids are drawn from the vocabulary without the special tokens; a model that takes vectors gets normally distributed
    float32.

    Args:
        lengths: The tokens of each sequence.
        info: The model that will be asked.
        request: What to ask for.
        seed: Of the ids.

    Raises:
        ValueError: A length or `request.sequences_per_call` is out of the model's bounds.
    """
    counts = [int(length) for length in lengths]
    if counts and not 1 <= min(counts) <= max(counts) <= info.max_sequence_tokens:
        raise ValueError(
            f"lengths must be from 1 to {info.max_sequence_tokens}, the model's longest; "
            f"were {min(counts)} to {max(counts)}"
        )
    rng = np.random.default_rng(seed)
    usable = np.setdiff1d(np.arange(info.vocab_size), info.special_token_ids)
    if info.input_kind != "embeddings" and not len(usable):
        raise ValueError(f"model {info.name} has no tokens but special ones")

    def random_input(count: int) -> pb.Input:
        if info.input_kind != "embeddings":
            return pb.Input(token_ids=pb.TokenIds(ids=rng.choice(usable, count).tolist()))
        data = rng.standard_normal((count, info.d_model), np.float32).astype("<f4").tobytes()
        return pb.Input(embeddings=pb.TokenEmbeddings(width=info.d_model, data_type=pb.DATA_TYPE_FLOAT32, data=data))

    return _pack(map(random_input, counts), counts, info, request)


def make_text_calls(texts: Sequence[str], info: ModelInfo, request: Request = Request()) -> list[Call]:
    """Calls of these texts, in their order; otherwise as `make_calls`.

    Raises:
        ValueError: The model takes no text, or does not give what is wanted, a text is too long, or
            `request.sequences_per_call` is out of bounds.
    """
    if not info.has_tokenizer:
        raise ValueError(f"model {info.name} has no tokenizer, so it takes no text")
    for index, text in enumerate(texts):
        if (size := len(text.encode())) > info.max_text_bytes:
            raise ValueError(f"texts[{index}] has {size} bytes; the server takes at most {info.max_text_bytes}")
    return _pack((pb.Input(text=it) for it in texts), [0] * len(texts), info, request)


def _pack(inputs: Iterator[pb.Input], counts: list[int], info: ModelInfo, request: Request) -> list[Call]:
    """Serialises; a count of 0 is one that is not known."""
    many = request.sequences_per_call
    if not 1 <= many <= info.max_request_sequences:
        raise ValueError(
            f"sequences_per_call must be from 1 to {info.max_request_sequences}, the server's limit; was {many}"
        )
    if len(counts) < many:
        raise ValueError(f"a call needs {many} sequences; there are only {len(counts)}")
    template = request.template()
    expected = _expected(info, request)
    calls = []
    for start in range(0, len(counts) - many + 1, many):
        lengths = tuple(counts[start : start + many])
        message = pb.EncodeRequest(inputs=itertools.islice(inputs, many))
        message.MergeFrom(template)
        calls.append(Call(message.SerializeToString(), many, sum(lengths), lengths if all(lengths) else (), expected))
    return calls


def _expected(info: ModelInfo, request: Request) -> Expected:
    if request.kind == "rows":
        return Expected(info.fingerprint, info.d_model, request.dtype, "one" if request.pooling else "each token")
    width = info.multi_vector_width if request.kind == "multi_vector" else min(info.sparse_width, 1)
    if not width:
        raise ValueError(f"model {info.name} gives no {request.kind}")
    return Expected(info.fingerprint, width, request.dtype, "any")

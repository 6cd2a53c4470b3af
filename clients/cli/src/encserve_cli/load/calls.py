"""The calls of a load test: Encode requests, serialized before the test starts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from encserve_client import DType, ModelInfo, Output, Pooling
from encserve_client.inputs import pack_input
from encserve_client.options import Options
from encserve_proto.v1 import encoder_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options that all calls of a load test share.

    Attributes:
        sequences_per_call: The number of sequences in a call.
        pooling: How each sequence's token vectors become one vector. None: one vector per token.
        dtype: The data type of the vectors.
        model: The model's name. None means the server's default model.
        version: The model's version. None means the model's default version.
    """

    sequences_per_call: int = 1
    pooling: Pooling | None = None
    dtype: DType = "float32"
    model: str | None = None
    version: str | None = None

    def template(self) -> pb.EncodeRequest:
        """Return the request without inputs."""
        options = Options((Output(self.pooling or "tokens"),), self.dtype, truncate=True)
        return pb.EncodeRequest(model=self.model or "", model_version=self.version or "", options=options.to_proto())


@dataclass(frozen=True, slots=True)
class Call:
    """One call to Encode.

    Attributes:
        data: The serialized EncodeRequest.
        sequences: The number of sequences in the request.
        tokens: The total number of tokens of these sequences, after truncation.
    """

    data: bytes
    sequences: int
    tokens: int


def random_calls(lengths: Sequence[int], info: ModelInfo, request: Request = Request(), *, seed: int = 0) -> list[Call]:
    """Make calls with random sequences.

    The ids are random ids from the vocabulary, without special tokens. If the model takes vectors, the sequences are
    normally distributed float32 vectors.

    Args:
        lengths: The number of tokens of each sequence, at most `info.max_sequence_tokens`, in the order of the calls.
        info: The model.
        request: The options of the calls. If the last sequences do not fill a call, they are not sent.
        seed: The seed of the random numbers.

    Raises:
        ValueError: `request.sequences_per_call` exceeds the server's limit, or the vocabulary has only special tokens.
    """
    rng = np.random.default_rng(seed)
    usable = np.setdiff1d(np.arange(info.vocab_size), info.special_token_ids)
    if info.input_kind != "embeddings" and not len(usable):
        raise ValueError(f"the vocabulary of model {info.name} has only special tokens; use texts or another model")

    def random_input(count: int) -> pb.Input:
        if info.input_kind != "embeddings":
            return pack_input(rng.choice(usable, count), "inputs")
        return pack_input(rng.standard_normal((count, info.d_model), np.float32), "inputs")

    return _pack(map(random_input, lengths), lengths, info, request)


def text_calls(
    texts: Iterable[str], token_counts: Sequence[int], info: ModelInfo, request: Request = Request()
) -> list[Call]:
    """Make calls with texts. `token_counts` has the number of tokens of each text, after truncation.

    Raises:
        ValueError: `request.sequences_per_call` exceeds the server's limit.
    """
    return _pack((pack_input(text, "texts") for text in texts), token_counts, info, request)


def _pack(inputs: Iterator[pb.Input], token_counts: Sequence[int], info: ModelInfo, request: Request) -> list[Call]:
    many = request.sequences_per_call
    if not 1 <= many <= info.max_request_sequences:
        raise ValueError(
            f"--sequences-per-call must be from 1 to {info.max_request_sequences}, the server's limit; was {many}"
        )
    template = request.template()
    calls = []
    for start in range(0, len(token_counts) - many + 1, many):
        message = pb.EncodeRequest(inputs=islice(inputs, many))
        message.MergeFrom(template)
        calls.append(Call(message.SerializeToString(), many, int(sum(token_counts[start : start + many]))))
    return calls

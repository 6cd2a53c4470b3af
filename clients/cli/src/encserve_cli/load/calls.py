"""The calls to make, serialised beforehand, and what a right answer to one of them is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from encserve_client import Input, ModelInfo, ProtocolError
from encserve_client._base import model_key
from encserve_client._logic.answers import decode_response
from encserve_client.inputs import pack_input
from encserve_client.options import Options
from encserve_proto.v1 import encoder_pb2 as pb

_TOKENS = Options()


@dataclass(frozen=True, slots=True)
class Expected:
    """What all answers of one workload have in common.

    Attributes:
        options: What was asked for.
        d_model: Numbers in a row.
        fingerprint: The model that must have answered.
    """

    options: Options
    d_model: int
    fingerprint: str


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
        part = decode_response(response, self.expected.options, self.sequences, describe=False)
        if part.fingerprint != self.expected.fingerprint:
            raise ProtocolError(f"the model is {part.fingerprint}; wanted {self.expected.fingerprint}")
        lengths = tuple(info.token_count for info in response.sequences)
        if self.lengths and lengths != self.lengths:
            raise ProtocolError(f"the sequences have {lengths} tokens; wanted {self.lengths}")
        for block in part.blocks:
            if block.rows.shape[1] != self.expected.d_model:
                raise ProtocolError(f"rows have {block.rows.shape[1]} numbers; wanted {self.expected.d_model}")
            if not np.isfinite(block.rows).all():
                raise ProtocolError("a number of the answer is not finite")
        return sum(lengths)


def make_calls(
    lengths: Sequence[int],
    info: ModelInfo,
    *,
    sequences_per_call: int = 1,
    options: Options = _TOKENS,
    model: str | None = None,
    version: str | None = None,
    seed: int = 0,
) -> list[Call]:
    """Calls of random sequences of these lengths, in their order.

    Ids are drawn from the vocabulary without the special tokens; a model that takes vectors gets normally distributed
    float32.

    Args:
        lengths: The tokens of each sequence.
        info: The model that will be asked.
        sequences_per_call: Sequences in a call; what is left over at the end is left out.
        options: What to ask for.
        model: The model's name. Default: the server's default model.
        version: Its version. Default: the model's default version.
        seed: Of the ids.

    Raises:
        ValueError: A length or sequences_per_call is out of the model's bounds.
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

    def inputs() -> Iterator[Input]:
        for count in counts:
            if info.input_kind == "embeddings":
                yield rng.standard_normal((count, info.d_model), np.float32)
            else:
                yield rng.choice(usable, count)

    return _pack(inputs(), counts, info, sequences_per_call, options, model_key(model, version))


def make_text_calls(
    texts: Sequence[str],
    info: ModelInfo,
    *,
    sequences_per_call: int = 1,
    options: Options = _TOKENS,
    model: str | None = None,
    version: str | None = None,
) -> list[Call]:
    """Calls of these texts, in their order; otherwise as `make_calls`.

    Raises:
        ValueError: The model takes no text, a text is too long, or sequences_per_call is out of the model's bounds.
    """
    if not info.has_tokenizer:
        raise ValueError(f"model {info.name} has no tokenizer, so it takes no text")
    for index, text in enumerate(texts):
        if (size := len(text.encode())) > info.max_text_bytes:
            raise ValueError(f"texts[{index}] has {size} bytes; the server takes at most {info.max_text_bytes}")
    return _pack(iter(texts), [0] * len(texts), info, sequences_per_call, options, model_key(model, version))


def _pack(
    inputs: Iterator[Input],
    counts: list[int],
    info: ModelInfo,
    sequences_per_call: int,
    options: Options,
    key: tuple[str, str],
) -> list[Call]:
    """Serialises; a count of 0 is one that is not known."""
    if not 1 <= sequences_per_call <= info.max_request_sequences:
        raise ValueError(
            f"sequences_per_call must be from 1 to {info.max_request_sequences}, the server's limit; "
            f"was {sequences_per_call}"
        )
    if len(counts) < sequences_per_call:
        raise ValueError(f"a call needs {sequences_per_call} sequences; there are only {len(counts)}")
    expected = Expected(options, info.d_model, info.fingerprint)
    calls = []
    for start in range(0, len(counts) - sequences_per_call + 1, sequences_per_call):
        lengths = tuple(counts[start : start + sequences_per_call])
        request = pb.EncodeRequest(
            model=key[0],
            model_version=key[1],
            options=options.to_proto(),
            inputs=[pack_input(next(inputs), f"inputs[{index}]") for index in range(sequences_per_call)],
        )
        known = lengths if all(lengths) else ()
        calls.append(Call(request.SerializeToString(), sequences_per_call, sum(lengths), known, expected))
    return calls

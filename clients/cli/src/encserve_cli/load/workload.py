"""The sequences that `encserve bench` sends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from encserve_cli.files.reading import read_lines
from encserve_cli.load.calls import Call, Request, random_calls, text_calls
from encserve_cli.load.lengths import sample_lengths
from encserve_client import EncoderClient, ModelInfo

# The number of different sequences. After the last sequence, the load test starts again with the first sequence.
_SEQUENCES = 4096
_MIN_CALLS = 64
_MAX_VECTOR_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Calls, and a description of their sequences.

    Attributes:
        calls: The calls.
        kind: "token_ids", "embeddings" or "texts".
        source: The source of the lengths or texts, as text for people.
        mean_tokens: The mean number of tokens of a sequence, after truncation.
        longest_tokens: The number of tokens of the longest sequence, after truncation.
        cut_sequences: The number of sequences that were cut to the model's limit.
    """

    calls: list[Call]
    kind: str
    source: str
    mean_tokens: float
    longest_tokens: int
    cut_sequences: int


def workload_of_lengths(histogram: Mapping[int, int], source: str, info: ModelInfo, request: Request) -> Workload:
    """Make random sequences with the lengths of a histogram. Raises ValueError in the same cases as `random_calls`."""
    count = _sequences(request)
    if info.input_kind == "embeddings":
        max_bytes = 4 * info.d_model * min(max(histogram), info.max_sequence_tokens)
        max_calls = _MAX_VECTOR_BYTES // (max_bytes * request.sequences_per_call)
        count = min(count, max(max_calls, 1) * request.sequences_per_call)
    sampled = sample_lengths(histogram, count, seed=0)
    lengths = np.minimum(sampled, info.max_sequence_tokens)
    return Workload(
        calls=random_calls(lengths.tolist(), info, request),
        kind=str(info.input_kind),
        source=source,
        mean_tokens=float(lengths.mean()),
        longest_tokens=int(lengths.max()),
        cut_sequences=int((sampled > lengths).sum()),
    )


def workload_of_texts(path: Path, client: EncoderClient, info: ModelInfo, request: Request) -> Workload:
    """Read the lines of a file that are not blank. The server counts their tokens.

    The texts are in random order. If a call needs more texts than the file has, texts repeat.

    Raises:
        OSError: The file is not readable.
        ValueError: The file has no text, or a line is too long or not UTF-8, or `request.sequences_per_call` exceeds
            the server's limit.
        EncserveError: The server cannot tokenize the texts.
    """
    texts = [line for line in read_lines(path) if line.strip()]
    if not texts:
        raise ValueError(f"{path} must have at least one line that is not blank")
    chosen = np.random.default_rng(0).permutation(len(texts))[: _sequences(request)].tolist()
    infos = client.tokenize(
        [texts[index] for index in chosen], model=request.model, version=request.version, truncate=True
    )
    n_calls = max(len(chosen) // request.sequences_per_call, 1)
    places: Sequence[int] = np.resize(np.arange(len(chosen)), n_calls * request.sequences_per_call).tolist()
    counts = [infos[place].token_count for place in places]
    return Workload(
        calls=text_calls([texts[chosen[place]] for place in places], counts, info, request),
        kind="texts",
        source=str(path),
        mean_tokens=float(np.mean(counts)),
        longest_tokens=max(counts),
        cut_sequences=sum(infos[place].truncated for place in places),
    )


def _sequences(request: Request) -> int:
    """Return the number of different sequences: enough for the distribution of lengths, and for several calls."""
    return request.sequences_per_call * max(_SEQUENCES // request.sequences_per_call, _MIN_CALLS)

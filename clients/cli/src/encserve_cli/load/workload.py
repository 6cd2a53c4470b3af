"""What `encserve bench` sends, and how to say so."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from encserve_cli.load.calls import Call, Request, make_calls, make_text_calls
from encserve_cli.load.lengths import sample_lengths
from encserve_client import ModelInfo

# So many different sequences; a run that has sent them all begins again. At most so many bytes of vectors among them.
_SEQUENCES = 4096
_LEAST_CALLS = 64
_VECTOR_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Calls, and what they are made of.

    Attributes:
        calls: The calls.
        kind: "token_ids", "embeddings" or "texts".
        source: Where lengths or texts come from, for people.
        mean_tokens: Of a sequence; None for texts.
        longest_tokens: Of a sequence; None for texts.
        cut_sequences: How many sequences were cut to the model's longest; texts are cut by the server, uncounted.
    """

    calls: list[Call]
    kind: str
    source: str
    mean_tokens: float | None = None
    longest_tokens: int | None = None
    cut_sequences: int = 0

    @property
    def sequences(self) -> int:
        """Of all calls."""
        return sum(call.sequences for call in self.calls)


def workload_of_lengths(
    histogram: Mapping[int, int], source: str, info: ModelInfo, request: Request, seed: int
) -> Workload:
    """Sequences of random ids, or vectors, with lengths of a distribution. Raises ValueError as `make_calls`."""
    count = _sequences(request)
    if info.input_kind == "embeddings":
        longest_bytes = 4 * info.d_model * min(max(histogram), info.max_sequence_tokens)
        most_calls = _VECTOR_BYTES // (longest_bytes * request.sequences_per_call)
        count = min(count, max(most_calls, 1) * request.sequences_per_call)
    wanted = sample_lengths(histogram, count, seed)
    lengths = np.minimum(wanted, info.max_sequence_tokens)
    return Workload(
        calls=make_calls(lengths.tolist(), info, request, seed=seed),
        kind=str(info.input_kind),
        source=source,
        mean_tokens=float(lengths.mean()),
        longest_tokens=int(lengths.max()),
        cut_sequences=int((wanted > lengths).sum()),
    )


def workload_of_texts(texts: Sequence[str], source: str, info: ModelInfo, request: Request, seed: int) -> Workload:
    """Texts in random order, the first again where a call needs more. Raises ValueError as `make_text_calls`."""
    if not texts:
        raise ValueError(f"{source} must hold at least one line that is not empty")
    order = np.random.default_rng(seed).permutation(len(texts))[: _sequences(request)]
    whole_calls = max(len(order) // request.sequences_per_call, 1) * request.sequences_per_call
    chosen = [texts[index] for index in np.resize(order, whole_calls).tolist()]
    return Workload(calls=make_text_calls(chosen, info, request), kind="texts", source=source)


def _sequences(request: Request) -> int:
    """How many different ones to make: enough for the lengths' distribution, in enough calls."""
    return request.sequences_per_call * max(_SEQUENCES // request.sequences_per_call, _LEAST_CALLS)

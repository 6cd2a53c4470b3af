"""What every side is given: the same sequences, of lengths that real texts have, in the same order of arrival."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Sequence64 = npt.NDArray[np.int64]  # (seq,) token ids

LENGTHS = Path(__file__).parent.parent / "lengths.json"


@dataclass(frozen=True, slots=True)
class Workload:
    """The sequences in order of arrival.

    Attributes:
        sequences: (seq,) ids each.
        about: Where the lengths come from.
    """

    sequences: list[Sequence64]
    about: str

    @property
    def tokens(self) -> int:
        """All their tokens, without any padding."""
        return sum(map(len, self.sequences))


def read_workload(path: Path, *, count: int, seed: int, vocab_size: int, longest: int) -> Workload:
    """Makes `count` sequences whose lengths are drawn from the histogram in `path`.

    Which ids they have does not matter to the time that a dense encoder takes, so they are random.
    """
    histogram, about = read_histogram(path)
    lengths = draw_lengths(histogram, count=count, seed=seed, longest=longest)
    rng = np.random.default_rng(seed)
    return Workload([rng.integers(0, vocab_size, length) for length in lengths], about)


def read_histogram(path: Path) -> tuple[dict[int, int], str]:
    """Tokens → texts, and where they come from."""
    content = json.loads(path.read_text())
    return {int(length): texts for length, texts in content["histogram"].items()}, content["about"]


def draw_lengths(histogram: Mapping[int, int], *, count: int, seed: int, longest: int) -> list[int]:
    """Draws lengths in tokens from a histogram tokens → texts, in random order; none is over `longest`.

    They are the quantiles (i + ½) / count, shuffled, rather than independent draws: so a few hundred sequences have the
    histogram's own shape, its rare long ones too, whatever the seed.
    """
    lengths = sorted(histogram)
    cumulated = np.cumsum([histogram[length] for length in lengths])  # (different lengths)
    places = (np.arange(count) + 0.5) / count * cumulated[-1]  # (count)
    drawn = np.array(lengths)[np.searchsorted(cumulated, places, side="right")]  # (count)
    return [min(int(it), longest) for it in np.random.default_rng(seed).permutation(drawn)]


def windows(sequences: Sequence[Sequence64], size: int) -> list[list[Sequence64]]:
    """Cuts into runs of `size` in order of arrival; the last may be shorter."""
    return [list(sequences[start : start + size]) for start in range(0, len(sequences), size)]


def sorted_batches(sequences: Sequence[Sequence64], max_padded_tokens: int) -> list[list[Sequence64]]:
    """Sorts by length and cuts into batches of at most so many padded tokens (longest × count).

    A sequence that is longer than that runs alone.
    """
    batches: list[list[Sequence64]] = []
    for sequence in sorted(sequences, key=len):
        # In ascending order the newest is the longest.
        if batches and len(sequence) * (len(batches[-1]) + 1) <= max_padded_tokens:
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
    return batches


def cycled(sequences: Sequence[Sequence64], size: int, count: int) -> list[list[Sequence64]]:
    """Makes `count` calls of `size` sequences, beginning again at the first where they end."""
    return [[sequences[i % len(sequences)] for i in range(k * size, (k + 1) * size)] for k in range(count)]

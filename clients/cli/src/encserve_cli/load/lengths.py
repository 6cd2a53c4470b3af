"""How long the sequences are: a distribution from a file, and as many lengths of it as are wanted."""

import json
from collections import Counter
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]


def real_text_lengths() -> dict[int, int]:
    """How many of 14,397 real English texts have how many tokens: tokens → texts."""
    text = resources.files("encserve_cli.load").joinpath("lengths.json").read_text(encoding="utf-8")
    return parse_lengths(json.loads(text))


def read_lengths(path: Path) -> dict[int, int]:
    """Reads a distribution: tokens → how many sequences have them.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not JSON, or not what `parse_lengths` takes.
    """
    try:
        return parse_lengths(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_lengths(found: Any) -> dict[int, int]:
    """Takes a list of lengths, or an object whose "histogram" says how many sequences have each length.

    Raises:
        ValueError: It is neither, it is empty, or a length is under 1 or no whole number.
    """
    if isinstance(found, list):
        histogram = Counter(_whole(it) for it in found)
    elif isinstance(found, Mapping) and isinstance(found.get("histogram"), Mapping):
        histogram = Counter({_whole(length): _whole(count, 0) for length, count in found["histogram"].items()})
    else:
        raise ValueError('lengths must be a JSON list of numbers, or an object with "histogram": {"tokens": count}')
    histogram = +histogram  # without those that occur 0 times
    if not histogram:
        raise ValueError("lengths must hold at least one length; was empty")
    return dict(sorted(histogram.items()))


def sample_lengths(histogram: Mapping[int, int], count: int, seed: int) -> Lengths:
    """So many lengths, (count,), in random order.

    They are the distribution's quantiles in the middle of `count` equal parts, not draws: so their mean is that of the
    distribution, and two seeds differ in order only.
    """
    lengths = np.array(list(histogram), np.int64)
    cumulative = np.cumsum(np.array(list(histogram.values()), np.int64))
    ranks = (np.arange(count) + 0.5) / count * cumulative[-1]
    found: Lengths = lengths[np.searchsorted(cumulative, ranks)]
    np.random.default_rng(seed).shuffle(found)
    return found


def _whole(value: Any, least: int = 1) -> int:
    """A whole number, also as the text that a JSON object's key is."""
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ValueError(f"lengths must hold whole numbers from {least}; was {value!r}")
    return number

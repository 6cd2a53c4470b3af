"""Distributions of the lengths of sequences, in tokens."""

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
    """Return the lengths of 14,397 real English texts: length in tokens → number of texts."""
    text = resources.files("encserve_cli.load").joinpath("lengths.json").read_text(encoding="utf-8")
    return _histogram(json.loads(text))


def read_lengths(path: Path) -> dict[int, int]:
    """Read a JSON file: a list of lengths, or {"histogram": {"LENGTH": number of sequences}}.

    Returns:
        The number of sequences of each length.

    Raises:
        OSError: The file is not readable.
        ValueError: The content is not valid.
    """
    try:
        return _histogram(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def sample_lengths(histogram: Mapping[int, int], count: int, seed: int) -> Lengths:
    """Return `count` lengths of a distribution in random order, (count,).

    The distribution is divided into `count` equal parts. Each length is the median of one part. So the mean stays
    nearly the same, and the seed changes only the order.
    """
    lengths = np.array(list(histogram), np.int64)
    cumulative = np.cumsum(np.array(list(histogram.values()), np.int64))
    ranks = (np.arange(count) + 0.5) / count * cumulative[-1]
    found: Lengths = lengths[np.searchsorted(cumulative, ranks)]
    np.random.default_rng(seed).shuffle(found)
    return found


def _histogram(content: Any) -> dict[int, int]:
    if isinstance(content, list):
        histogram = Counter(_integer(length) for length in content)
    elif isinstance(content, Mapping) and isinstance(content.get("histogram"), Mapping):
        histogram = Counter({_integer(length): _integer(count, 0) for length, count in content["histogram"].items()})
    else:
        raise ValueError('lengths must be a JSON list of integers, or an object with "histogram": {"LENGTH": COUNT}')
    histogram = +histogram  # drops lengths with the count 0
    if not histogram:
        raise ValueError("lengths must have at least one length; was empty")
    return dict(sorted(histogram.items()))


def _integer(value: Any, least: int = 1) -> int:
    """Return an integer. The keys of a JSON object are strings, so a string of digits is an integer too."""
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ValueError(f"lengths must be integers of at least {least}; was {value!r}")
    return number

"""The numbers of a report: what is computed from attention weights and hidden states. Only NumPy, no drawing."""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from encserve_client import Array, Timings

Float64 = npt.NDArray[np.float64]
STEPS = 65535  # of a `quantise`d number: uint16


def state_norms(states: Array) -> Float64:
    """(layers, seq): the Euclidean length of every row of (layers, seq, d_model)."""
    norms: Float64 = np.linalg.norm(states.astype(np.float64), axis=-1)
    return norms


def cosine_similarity(states: Array) -> Float64:
    """(layers, seq, seq): the cosine of the angle between every two rows of a layer, from (layers, seq, d_model).

    A row of zeros has no direction; its cosines are 0.
    """
    rows = states.astype(np.float64)
    norms = state_norms(states)[:, :, None]  # (layers, seq, 1)
    units = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    cosines: Float64 = np.clip(units @ units.transpose(0, 2, 1), -1, 1)
    return cosines


def attention_entropy(attention: Array) -> Float64:
    """(layers, heads, seq): the entropy of every row of (layers, heads, seq, seq), in bits.

    H(p) = -Σ p log2 p: 0 where a token attends to one token alone, log2(seq) where it attends to all alike.
    """
    entropy: Float64 = np.zeros(attention.shape[:-1])
    for layer, weights in enumerate(attention):  # a layer at a time: all of them in float64 may be gigabytes
        exact = weights.astype(np.float64)
        logs = np.log2(exact, out=np.zeros_like(exact), where=exact > 0)
        entropy[layer] = np.maximum(-(exact * logs).sum(axis=-1), 0)
    return entropy


def mean_similarity(cosines: Float64) -> Float64:
    """(layers,): the mean cosine of every two different tokens, from (layers, seq, seq); 1 where there is one token."""
    seq = cosines.shape[-1]
    if seq == 1:
        return np.ones(len(cosines))
    others: Float64 = cosines[:, ~np.eye(seq, dtype=np.bool_)]  # (layers, seq · (seq - 1))
    means: Float64 = others.mean(axis=1)
    return means


def strongest(attention: Array) -> tuple[npt.NDArray[np.int64], Float64]:
    """Where each token of one layer looks most, from (heads, seq, seq): the place and its weight, both (seq,).

    The weight is the mean over the heads.
    """
    means: Float64 = attention.astype(np.float64).mean(axis=0)  # (seq, seq)
    return means.argmax(axis=1), means.max(axis=1)


def time_parts(timings: Timings) -> dict[str, float]:
    """A call's time by part, in seconds; "the rest" is the wire, the coding of messages, and retries."""
    parts = {
        "tokenize": timings.tokenize_seconds,
        "queue": timings.queue_seconds,
        "compute": timings.compute_seconds,
    }
    return parts | {"wire and the rest": max(timings.total_seconds - sum(parts.values()), 0.0)}


def shares(counts: Mapping[str, int]) -> dict[str, float]:
    """Each part's share of the sum, from 0 to 1; all 0 where there is nothing."""
    total = sum(counts.values())
    return {part: count / total if total else 0.0 for part, count in counts.items()}


def spread(count: int, at_most: int) -> list[int]:
    """At most so many indices below count, evenly spread; the first and the last are among them."""
    if count <= at_most:
        return list(range(count))
    if at_most <= 1:
        return [count - 1][:at_most]
    return sorted({round(i * (count - 1) / (at_most - 1)) for i in range(at_most)})


def quantise(values: Array, low: float, high: float) -> npt.NDArray[np.uint16]:
    """Numbers from low to high as whole ones from 0 to 65535: off by at most (high - low) / 131070.

    What lies outside, infinities too, becomes the nearer end; NaN becomes low.
    """
    span = high - low or 1.0
    scaled = np.nan_to_num((values.astype(np.float64) - low) / span, nan=0.0, posinf=1.0, neginf=0.0)
    return np.rint(np.clip(scaled, 0, 1) * STEPS).astype("<u2")


def widest(values: Array) -> float:
    """The greatest finite magnitude; 1 where there is none, so that it can be a scale's end."""
    finite = np.abs(values[np.isfinite(values)].astype(np.float64))
    greatest = float(finite.max()) if finite.size else 0.0
    return greatest if greatest > 0 and math.isfinite(greatest) else 1.0


def contrast(values: Array) -> tuple[float, float]:
    """Where a scale of colours should end, and the share of the numbers that lie beyond, from 0 to 1.

    The greatest magnitude; but where a few outliers would leave all others pale, the magnitude that 99 % stay within.
    """
    greatest = widest(values)
    magnitudes = np.abs(values[np.isfinite(values)].astype(np.float64))
    usual = float(np.quantile(magnitudes, 0.99)) if magnitudes.size else greatest
    if not 0 < usual < greatest / 2:
        return greatest, 0.0
    return usual, float((magnitudes > usual).mean())

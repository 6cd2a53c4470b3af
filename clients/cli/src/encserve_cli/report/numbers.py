"""Numbers computed from attention weights and hidden states, with NumPy alone."""

import numpy as np
import numpy.typing as npt

from encserve_client import Array

Float64 = npt.NDArray[np.float64]


def state_norms(states: Array) -> Float64:
    """Return the Euclidean norms (layers, seq) of hidden states (layers, seq, d_model)."""
    norms: Float64 = np.linalg.norm(states.astype(np.float64), axis=-1)
    return norms


def cosine_similarity(states: Array) -> Float64:
    """Return the cosine of every two tokens: (layers, seq, seq), from hidden states (layers, seq, d_model).

    The cosines of a row of zeros are 0.
    """
    rows = states.astype(np.float64)
    norms = state_norms(states)[:, :, None]  # (layers, seq, 1)
    units = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    cosines: Float64 = np.clip(units @ units.transpose(0, 2, 1), -1, 1)
    return cosines


def attention_entropy(attention: Array) -> Float64:
    """Return the entropy in bits, (layers, heads, seq), of each row of attention weights, (layers, heads, seq, seq).

    H(p) = -Σ p log2 p. H is 0 if a token attends to only one token. H is log2(seq) if the token attends to all
    tokens equally.
    """
    entropy: Float64 = np.zeros(attention.shape[:-1])
    for layer, weights in enumerate(attention):  # one layer at a time, because all layers in float64 may take gigabytes
        exact = weights.astype(np.float64)
        logs = np.log2(exact, out=np.zeros_like(exact), where=exact > 0)
        entropy[layer] = np.maximum(-(exact * logs).sum(axis=-1), 0)
    return entropy


def mean_similarity(cosines: Float64) -> Float64:
    """Return the mean cosine over pairs of different tokens: (layers,), from (layers, seq, seq).

    If there is only one token, the mean is 1.
    """
    seq = cosines.shape[-1]
    if seq == 1:
        return np.ones(len(cosines))
    means: Float64 = cosines[:, ~np.eye(seq, dtype=np.bool_)].mean(axis=1)
    return means


def most_attended(attention: Array) -> tuple[npt.NDArray[np.int64], Float64]:
    """Return for each token the position with the largest attention weight, (seq,), and the weight, (seq,).

    The input is (heads, seq, seq). The weight is the mean over the heads.
    """
    means: Float64 = attention.astype(np.float64).mean(axis=0)  # (seq, seq)
    return means.argmax(axis=1), means.max(axis=1)


def spaced_indices(count: int, at_most: int) -> list[int]:
    """Return at most `at_most` evenly spaced indices below `count`, in order. The last index is count - 1."""
    spaced = np.linspace(count - 1, 0, min(count, at_most)).round()
    return [int(index) for index in spaced[::-1]]


def largest_magnitude(values: Array) -> float:
    """Return the upper end of a colour scale: the largest finite magnitude, or 1 if all values are 0."""
    finite = np.abs(values[np.isfinite(values)].astype(np.float64))
    return float(finite.max(initial=0)) or 1.0


def colour_limit(values: Array) -> tuple[float, float]:
    """Return the upper end of a colour scale, and the share of values beyond this end, from 0 to 1.

    The end is the largest magnitude. If outliers would make all other colours pale, the end is the 99th percentile.
    """
    largest = largest_magnitude(values)
    magnitudes = np.abs(values[np.isfinite(values)].astype(np.float64))
    limit = float(np.quantile(magnitudes, 0.99)) if magnitudes.size else largest
    if not 0 < limit < largest / 2:
        return largest, 0.0
    return limit, float((magnitudes > limit).mean())

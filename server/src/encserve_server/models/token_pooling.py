"""Fewer vectors of many: hierarchical clustering, as HierarchicalTokenPooling of sentence-transformers does it."""

import importlib.util

import numpy as np

from encserve_server.models.pooling import normalized
from encserve_server.types import Numbers, TokenPooling

EXTRA = "encserve-server[pooling]"


def can_pool() -> bool:
    """Whether what clusters is installed."""
    return importlib.util.find_spec("scipy") is not None


def pool_tokens(vectors: Numbers, pooling: TokenPooling) -> Numbers:
    """Joins vectors that are alike: Ward's linkage on 1 - dot product, each cluster replaced by its mean.

    Args:
        vectors: (n, width) float32, of length 1.
        pooling: Into how many clusters, max(1, floor(n / factor)) of the n that are not protected.

    Returns:
        (n or fewer, width) float32: the protected vectors, then the clusters in the order of their numbers.
    """
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    protected, rest = vectors[: pooling.protected_tokens], vectors[pooling.protected_tokens :]
    count = max(int(len(rest) // pooling.factor), 1)
    if count < len(rest):
        distances = np.clip(1 - rest @ rest.T, 0, 2)  # (n, n)
        tree = hierarchy.linkage(squareform(distances, checks=False), method="ward")
        labels = hierarchy.fcluster(tree, t=count, criterion="maxclust")  # (n,)
        found, places, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        sums = np.zeros((len(found), vectors.shape[1]), np.float32)
        np.add.at(sums, places, rest)
        vectors = np.concatenate([protected, sums / sizes[:, None].astype(np.float32)])
    return normalized(vectors) if pooling.l2_normalize else vectors

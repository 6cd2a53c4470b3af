"""Joins similar vectors by hierarchical clustering, like HierarchicalTokenPooling of sentence-transformers.

For 2,048 vectors, SciPy's linkage holds the GIL for 0.2 s, and stops the rest of the server. So this module computes
the linkage with short NumPy calls. SciPy only cuts the cluster tree.
"""

import importlib.util

import numpy as np
import numpy.typing as npt

from encserve_server.outputs.rows import l2_normalized
from encserve_server.types.arrays import Numbers
from encserve_server.types.bundles import TokenPooling

Distances = npt.NDArray[np.float64]


def can_pool() -> bool:
    """Return whether SciPy is installed."""
    return importlib.util.find_spec("scipy") is not None


def pool_tokens(vectors: Numbers, pooling: TokenPooling) -> Numbers:
    """Join vectors once; see `TokenPooler.pool`."""
    return TokenPooler(vectors).pool(pooling)


class TokenPooler:
    """Joins the vectors of one sequence. Poolings with the same number of protected vectors share one cluster tree."""

    def __init__(self, vectors: Numbers) -> None:
        """Set the (n, width) float32 vectors, which are finite and have norm 1."""
        self._vectors = vectors
        self._trees: dict[int, Distances] = {}

    def pool(self, pooling: TokenPooling) -> Numbers:
        """Cluster the vectors by Ward's linkage on 1 - dot product, and replace each cluster by its mean.

        Args:
            pooling: The factor and the number of protected vectors. The n other vectors become
                max(1, floor(n / factor)) clusters.

        Returns:
            (n or fewer, width) float32: the protected vectors, then the clusters in the order of SciPy's labels. The
            mean is zero if the vectors of a cluster cancel each other out, and NaN if a norm overflows.
        """
        vectors, protected = self._vectors, pooling.protected_tokens
        rest = vectors[protected:]
        count = max(int(len(rest) // pooling.factor), 1)
        if count < len(rest):
            from scipy.cluster import hierarchy

            if protected not in self._trees:
                self._trees[protected] = linkage(_distances(rest))
            labels = hierarchy.fcluster(self._trees[protected], t=count, criterion="maxclust")  # (n,)
            clusters, cluster_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
            sums = np.zeros((len(clusters), vectors.shape[1]), np.float32)
            np.add.at(sums, cluster_of, rest)
            vectors = np.concatenate([vectors[:protected], sums / sizes[:, None].astype(np.float32)])
        if pooling.l2_normalize:
            vectors, invalid = l2_normalized(vectors)
            if invalid is not None:
                vectors[invalid] = np.nan
        return vectors


def _distances(vectors: Numbers) -> Distances:
    """Return the (n, n) distances of (n, width) vectors. A distance is 1 - dot product, clipped to 0…2."""
    distances = vectors @ vectors.T  # float32, like sentence-transformers
    np.subtract(1, distances, out=distances)
    np.fmin(np.fmax(distances, 0, out=distances), 2, out=distances)  # replaces NaN, which would make a chain endless
    return distances.astype(np.float64)


def linkage(distances: Distances) -> Distances:
    """Compute Ward's linkage by chains of nearest neighbours (Müllner, arXiv:1109.2378, figure 6).

    Args:
        distances: (n, n), symmetric, with n at least 2. The function overwrites the array.

    Returns:
        The (n - 1, 4) tree, with the same bits as `scipy.cluster.hierarchy.linkage(…, "ward")`. A row has the two
        clusters that are merged, their distance, and the size of the new cluster.
    """
    count = len(distances)
    sizes = np.ones(count)  # 0 for a cluster that was merged into another
    np.fill_diagonal(distances, np.inf)
    merges = np.empty((count - 1, 4))
    chain: list[int] = []
    for i in range(count - 1):
        chain = chain or [int((sizes > 0).argmax())]
        first, second = sorted(_extend(chain, distances))
        del chain[-2:]
        distance, size = distances[first, second], sizes[first] + sizes[second]
        merges[i] = first, second, distance, size
        merged = _merged(distances, sizes, first, second)
        sizes[first], sizes[second] = 0, size
        merged[sizes == 0] = merged[second] = np.inf
        distances[second] = distances[:, second] = merged
        distances[:, first] = np.inf
    return _tree(merges[np.argsort(merges[:, 2], kind="stable")])


def _extend(chain: list[int], distances: Distances) -> tuple[int, int]:
    """Append nearest neighbours until the last two clusters are nearest to each other. Return these two clusters."""
    while True:
        row = distances[chain[-1]]
        nearest = int(row.argmin())
        if len(chain) > 1 and row[nearest] == row[chain[-2]]:
            return chain[-2], chain[-1]
        chain.append(nearest)


def _merged(distances: Distances, sizes: Distances, first: int, second: int) -> Distances:
    """Return the (n,) distances of all clusters from the merged cluster (Lance and Williams), rounded like SciPy."""
    share = 1.0 / (sizes[first] + sizes[second] + sizes)
    merged: Distances = (sizes + sizes[first]) * share * distances[first] * distances[first]
    merged += (sizes + sizes[second]) * share * distances[second] * distances[second]
    merged -= sizes * share * distances[first, second] * distances[first, second]
    np.sqrt(merged, out=merged)
    return merged


def _tree(merges: Distances) -> Distances:
    """Number the merged clusters from n on, like SciPy.

    `merges` is sorted by distance, and has the index of one vector for each cluster. The function overwrites `merges`.
    """
    count = len(merges) + 1
    parents = list(range(2 * count - 1))
    sizes = [1] * count + [0] * (count - 1)
    for i, (first, second) in enumerate(merges[:, :2].astype(np.int64).tolist()):
        pair = sorted((_root(parents, first), _root(parents, second)))
        sizes[count + i] = sizes[pair[0]] + sizes[pair[1]]
        parents[pair[0]] = parents[pair[1]] = count + i
        merges[i, :2], merges[i, 3] = pair, sizes[count + i]
    return merges


def _root(parents: list[int], node: int) -> int:
    """Return the cluster that contains a vector, and shorten the path for the next search."""
    while parents[node] != node:
        parents[node] = parents[parents[node]]
        node = parents[node]
    return node

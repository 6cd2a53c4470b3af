"""Fewer vectors of many: hierarchical clustering, as HierarchicalTokenPooling of sentence-transformers does it.

SciPy's linkage holds Python's lock until it is done, 0.2 s for 2,048 vectors, and nothing else of the server runs
meanwhile. So the linkage is made here, of calls of NumPy that are short; SciPy cuts the tree.
"""

import importlib.util

import numpy as np
import numpy.typing as npt

from encserve_server.outputs.rows import normalized
from encserve_server.types.arrays import Numbers
from encserve_server.types.bundles import TokenPooling

EXTRA = "encserve-server[pooling]"

Distances = npt.NDArray[np.float64]


def can_pool() -> bool:
    """Whether what cuts trees is installed."""
    return importlib.util.find_spec("scipy") is not None


def pool_tokens(vectors: Numbers, pooling: TokenPooling) -> Numbers:
    """`PooledTokens.joined` of vectors that are joined once."""
    return PooledTokens(vectors).joined(pooling)


class PooledTokens:
    """The vectors of one sequence, which are joined in several ways; one tree serves all that protect as many."""

    def __init__(self, vectors: Numbers) -> None:
        """Takes (n, width) float32 vectors, of length 1 and finite."""
        self._vectors = vectors
        self._trees: dict[int, Distances] = {}

    def joined(self, pooling: TokenPooling) -> Numbers:
        """Joins vectors that are alike: Ward's linkage on 1 - dot product, each cluster replaced by its mean.

        Args:
            pooling: Into how many clusters, max(1, floor(n / factor)) of the n that are not protected.

        Returns:
            (n or fewer, width) float32: the protected vectors, then the clusters in the order of their numbers. A
            vector is zero where those of a cluster cancel each other out, and NaN where a norm overflows.
        """
        vectors, protected = self._vectors, pooling.protected_tokens
        rest = vectors[protected:]
        count = max(int(len(rest) // pooling.factor), 1)
        if count < len(rest):
            from scipy.cluster import hierarchy

            if protected not in self._trees:
                self._trees[protected] = linkage(_distances(rest))
            labels = hierarchy.fcluster(self._trees[protected], t=count, criterion="maxclust")  # (n,)
            found, places, sizes = np.unique(labels, return_inverse=True, return_counts=True)
            sums = np.zeros((len(found), vectors.shape[1]), np.float32)
            np.add.at(sums, places, rest)
            vectors = np.concatenate([vectors[:protected], sums / sizes[:, None].astype(np.float32)])
        if pooling.l2_normalize:
            vectors, lost = normalized(vectors)
            if lost is not None:
                vectors[lost] = np.nan
        return vectors


def _distances(vectors: Numbers) -> Distances:
    """(n, width) to (n, n): 1 - dot product, from 0 to 2."""
    distances = vectors @ vectors.T  # float32, as sentence-transformers has it
    np.subtract(1, distances, out=distances)
    np.fmin(np.fmax(distances, 0, out=distances), 2, out=distances)  # none is NaN, for which no chain would end
    return distances.astype(np.float64)


def linkage(distances: Distances) -> Distances:
    """Ward's linkage by chains of nearest neighbours (Müllner, arXiv:1109.2378, figure 6).

    Args:
        distances: (n, n), symmetric, n at least 2; overwritten.

    Returns:
        (n - 1, 4) the tree, to the last bit that of `scipy.cluster.hierarchy.linkage(…, "ward")`: two clusters that
        become one, their distance, and the size of the one.
    """
    count = len(distances)
    sizes = np.ones(count)  # 0 for a cluster that is part of another
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
    """Extends a chain, each of which is nearest to the one before, to two that are nearest to each other."""
    while True:
        row = distances[chain[-1]]
        nearest = int(row.argmin())
        if len(chain) > 1 and row[nearest] == row[chain[-2]]:
            return chain[-2], chain[-1]
        chain.append(nearest)


def _merged(distances: Distances, sizes: Distances, first: int, second: int) -> Distances:
    """(n,) the distance of every cluster from two that become one (Lance and Williams), in SciPy's order."""
    share = 1.0 / (sizes[first] + sizes[second] + sizes)
    merged: Distances = (sizes + sizes[first]) * share * distances[first] * distances[first]
    merged += (sizes + sizes[second]) * share * distances[second] * distances[second]
    merged -= sizes * share * distances[first, second] * distances[first, second]
    np.sqrt(merged, out=merged)
    return merged


def _tree(merges: Distances) -> Distances:
    """Merges in the order of their distances, each of two vectors, to merges of clusters, numbered from n on."""
    count = len(merges) + 1
    parents = list(range(2 * count - 1))
    sizes = [1] * count + [0] * (count - 1)
    for i, (first, second) in enumerate(merges[:, :2].astype(np.int64).tolist()):
        pair = sorted((_root(parents, first), _root(parents, second)))
        sizes[count + i] = sizes[pair[0]] + sizes[pair[1]]
        parents[pair[0]] = parents[pair[1]] = count + i
        merges[i, :2], merges[i, 3] = pair, sizes[count + i]
    return merges


def _root(parents: list[int], place: int) -> int:
    """The cluster that a vector is part of; makes the way there short for the next search."""
    while parents[place] != place:
        parents[place] = parents[parents[place]]
        place = parents[place]
    return place

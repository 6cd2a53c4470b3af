"""For models of tests/support/zoo.py, the bundle returns the same vectors as the model's own library.

The tests compare the vectors for each prompt and each task. The bundle encodes the texts in a batch, and some texts
also alone.
"""

from pathlib import Path

import numpy as np
import pytest
from zoo import MODELS, Zoo, assert_same, embedded

from encserve_server.offline import Embedder


def open_bundle(path: Path) -> Embedder:
    return Embedder(path, tune_batches=False, intra_op_threads=1, device="cpu")


# Together, these models have each kind of vectors and each feature. The end-to-end tests compare all models through a
# server.
NAMES = (
    *("every-pooling", "heads", "prompt-left-out", "lengths-of-tasks", "lower-case", "messages", "all-of-it", "static"),
    *("fixed-unattended", "pylate", "stanford", "sum-log1p", "static-queries"),
)


@pytest.mark.parametrize("name", NAMES)
def test_the_bundle_gives_the_vectors_of_the_library(zoo: Zoo, name: str) -> None:
    row, exported = MODELS[name], zoo.export(name)
    assert exported.manifest.parity.pipeline_texts >= 5
    with open_bundle(exported.path) as embedder:
        for way in row.ways:
            want = zoo.vectors(name, way)
            assert_same(row.kind, embedded(embedder, way, row.texts), want, way)
        for text, vectors in zip(row.texts[:4], want[:4], strict=True):
            assert_same(row.kind, embedded(embedder, way, [text]), [vectors], f"{way}, alone")


def test_static_vectors_do_not_depend_on_the_batch(zoo: Zoo) -> None:
    with open_bundle(zoo.export("static").path) as embedder:
        texts = MODELS["static"].texts
        alone = np.concatenate([embedder.embed([text]) for text in texts])
        np.testing.assert_array_equal(alone, embedder.embed(texts))

"""The kinds of output that a model was trained for, and the routes that serve these kinds."""

from collections.abc import Mapping

from encserve_server.errors import InvalidField
from encserve_server.types.bundles import Bundle

EMBEDDING, SPARSE, MULTI_VECTOR, SCORES, TOKENS = "embedding", "sparse", "multi_vector", "scores", "tokens"
_WHAT = {
    EMBEDDING: ("one vector for each input", "POST /v1/embeddings or POST /embed"),
    SPARSE: ("sparse weights", "POST /embed_sparse"),
    MULTI_VECTOR: ("one vector for each token, for MaxSim", "POST /pooling with the task token_embed"),
    SCORES: ("scores of labels", "POST /rerank for one label, POST /classify for several"),
    TOKENS: ("one row for each token", "POST /embed_all"),
}


def trained_for(bundle: Bundle) -> list[str]:
    """Return the kinds of output that a model was trained for; empty if the bundle does not name any."""
    has = {EMBEDDING: bundle.pooling, SPARSE: bundle.sparse, MULTI_VECTOR: bundle.multi_vector, SCORES: bundle.scores}
    return [kind for kind, part in has.items() if part is not None]


def routes_of(bundle: Bundle) -> Mapping[str, list[str]]:
    """Return the paths that serve each kind of output that a model has."""
    one_label = bundle.scores is not None and len(bundle.scores.labels) == 1
    routes = {
        EMBEDDING: ["/v1/embeddings", "/embed"],
        SPARSE: ["/embed_sparse"],
        MULTI_VECTOR: ["/pooling"],
        SCORES: ["/rerank", "/score"] if one_label else ["/classify", "/predict"],
    }
    rows = ["/embed_all"] if bundle.multi_vector is not None else ["/embed_all", "/pooling"]
    return {kind: routes[kind] for kind in trained_for(bundle)} | {TOKENS: rows}


def lacks(bundle: Bundle, kind: str) -> InvalidField:
    """Return the error for a kind of output that a model does not have. It lists the model's outputs and routes."""
    made = "; and ".join(f"{what}: {route}" for what, route in map(_WHAT.__getitem__, trained_for(bundle) or [TOKENS]))
    return InvalidField("model", f"{bundle.name} does not compute {_WHAT[kind][0]}; it computes {made}")

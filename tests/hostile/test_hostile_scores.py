"""Callers attack a real server with requests for scores, ranks and labels. Each attack has a control: ordinary calls.

During the control and the attack, another caller sends Encode calls. All these calls must succeed. The tests
measure latencies, so no other test may run at the same time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hostile_attacks import SCORE, ask_grpc, ask_http
from hostile_calls import post, serialized
from hostile_measure import Driver, hostile_server, measure
from hostile_models import NAN_TEXT, write_classifier, write_cross_encoder
from real_server import RealServer

from encserve_proto.v1 import encoder_pb2 as pb

MOST_DOCUMENTS = 2_048
MOST_TEXT_BYTES = 2**18
TEXT = "a dog " * 20
LONGEST = "a dog " * (MOST_TEXT_BYTES // 6)
MIB_TEXT = "a dog " * (1_000_000 // 6)
REFUSED = "INVALID_ARGUMENT"


@dataclass(frozen=True)
class Row:
    """An attack and its control.

    Attributes:
        control: Returns a function of hostile_attacks that makes ordinary calls, and the function's arguments.
        attack: Returns a function of hostile_attacks that attacks the server, and the function's arguments.
        status: The status of every reply to the attack.
        write_model: Writes the model into a repository.
    """

    control: Callable[[RealServer], Driver]
    attack: Callable[[RealServer], Driver]
    status: str
    write_model: Callable[[Path], None] = write_cross_encoder


def over_grpc(callers: int, **fields: Any) -> Callable[[RealServer], Driver]:
    """Return a function for `control` or `attack` of a Row. Its callers call Score with a request of these fields."""
    return lambda server: (ask_grpc, server.target, SCORE, [serialized(pb.ScoreRequest(**fields))], callers)


def over_http(path: str, callers: int, **fields: Any) -> Callable[[RealServer], Driver]:
    """Return a function for `control` or `attack` of a Row. Its callers post these fields to the route `path`."""
    return lambda server: (ask_http, server.http_port, post(path, fields), callers)


def ranks(query: str, documents: list[str]) -> dict[str, Any]:
    return {"query": query, "documents": documents}


CONTROL = over_grpc(2, **ranks("a", [TEXT] * 64))
HTTP_CONTROL = over_http("/rerank", 2, **ranks("a", [TEXT] * 64))
CLASSIFY = over_grpc(1, texts=[TEXT] * 64)
ROWS = {
    "2,048 documents": Row(CONTROL, over_grpc(4, **ranks("a", [TEXT] * MOST_DOCUMENTS)), "OK"),
    "2,048 documents over HTTP": Row(
        HTTP_CONTROL, over_http("/rerank", 4, **ranks("a", [TEXT] * MOST_DOCUMENTS)), "200"
    ),
    "2,049 documents": Row(
        CONTROL, over_grpc(4, **ranks("a", ["a"] * (MOST_DOCUMENTS + 1))), f"{REFUSED} TOO_MANY_INPUTS"
    ),
    "a query of the longest length": Row(CONTROL, over_grpc(2, **ranks(LONGEST, [TEXT] * MOST_DOCUMENTS)), "OK"),
    "documents of the longest length": Row(CONTROL, over_grpc(2, **ranks("a", [LONGEST] * 15)), "OK"),
    "documents of 1 MB": Row(CONTROL, over_grpc(4, **ranks("a", [MIB_TEXT] * 4)), f"{REFUSED} INVALID_FIELD"),
    "documents of 1 MB over HTTP": Row(HTTP_CONTROL, over_http("/v1/rerank", 4, **ranks("a", [MIB_TEXT] * 8)), "400"),
    "top_k too large": Row(CONTROL, over_grpc(4, **ranks("a", [TEXT] * MOST_DOCUMENTS), top_k=2**32 - 1), "OK"),
    "top_n too large": Row(HTTP_CONTROL, over_http("/v2/rerank", 4, **ranks("a", [TEXT] * 256), top_n=2**62), "200"),
    "top_n 0": Row(HTTP_CONTROL, over_http("/v2/rerank", 4, **ranks("a", [TEXT] * 256), top_n=0), "400"),
    "scores of NaN": Row(
        CONTROL,
        over_grpc(4, **ranks("a", [TEXT] * (MOST_DOCUMENTS - 1) + [NAN_TEXT])),
        "INTERNAL INFERENCE_FAILED",
    ),
    "only scores of NaN": Row(
        CONTROL, over_grpc(4, **ranks(NAN_TEXT, [TEXT] * MOST_DOCUMENTS)), "INTERNAL INFERENCE_FAILED"
    ),
    "the largest reply with 10,000 labels": Row(CLASSIFY, over_grpc(4, texts=["a"] * 1_500), "OK", write_classifier),
    "10,000 labels of 2,048 texts": Row(
        CLASSIFY,
        over_grpc(4, texts=["a"] * MOST_DOCUMENTS),
        f"{REFUSED} RESPONSE_TOO_LARGE",
        write_classifier,
    ),
    "10,000 labels as JSON": Row(
        over_http("/predict", 1, inputs=[["a"]] * 4),
        over_http("/predict", 4, inputs=[["a"]] * 40),
        "200",
        write_classifier,
    ),
    "ranks with 10,000 labels": Row(
        over_http("/predict", 1, inputs=[["a"]] * 4),
        over_http("/rerank", 4, **ranks("a", [TEXT] * MOST_DOCUMENTS)),
        "422",
        write_classifier,
    ),
}


@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in ROWS.items()])
def test_attack_with_scores(tmp_path: Path, row: Row) -> None:
    row.write_model(tmp_path)
    with hostile_server(tmp_path) as server:
        outcome = measure(server, row.control(server), row.attack(server))
        outcome.check()
        statuses = {status for status in outcome.report if status != "connections ended"}
        assert statuses == {row.status}, outcome.report

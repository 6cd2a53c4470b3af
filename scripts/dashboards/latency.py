"""Latency: where does the time of a request go?"""

from dashboards.parts import (
    BULK_OBJECTIVE,
    ENCODE,
    GRPC,
    INSTANCE,
    LATENCY_OBJECTIVE,
    MODEL,
    Board,
    Query,
    mean,
    quantile,
    quantiles,
    rate,
    rising,
)
from grafana_foundation_sdk.models import dashboard as models

_STAGES = {
    "tokenize": "of a request's texts",
    "queue": "of a sequence, until its batch begins",
    "collate": "of a batch: laying it out as one array",
    "compute": "of a batch: the model's run",
    "split": "of a batch: checking its rows, and pooling and normalising them",
    "encode": "of a reply: pooling and serialising",
}


def build() -> models.Dashboard:
    """The dashboard."""
    board = Board("latency", "Latency", "How long calls take, and in which stage the time goes.")
    _calls(board)
    _breakdown(board)
    board.row("Stages in detail")
    for stage, what in _STAGES.items():
        labels = f'{MODEL}, stage="{stage}"'
        board.lines(
            stage.capitalize(), f"Quantiles of the time {what}.", "s",
            *quantiles("encserve_stage_seconds", labels, "model"),
        )  # fmt: skip
    return board.build()


def _calls(board: Board) -> None:
    board.row("Calls")
    board.lines(
        "Calls that encode", "All protocols, without bulk, until the answer; the line is the objective's bound.", "s",
        *quantiles("encserve_answer_seconds", ENCODE),
        steps=rising(float(LATENCY_OBJECTIVE)),
    )  # fmt: skip
    board.heat(
        "Calls that encode, all", "How many calls took how long; two bands are two kinds of requests.", "s",
        "encserve_answer_seconds", ENCODE,
    )  # fmt: skip
    in_time = f'{ENCODE}, le="{LATENCY_OBJECTIVE}"'
    slow = (
        f"1 - {rate('encserve_answer_seconds_bucket', in_time, 'instance')} "
        f"/ {rate('encserve_answer_seconds_count', ENCODE, 'instance')}"
    )
    board.lines(
        "Slow calls", "The share of calls above the objective's bound, by server; the line is what it allows.",
        "percentunit", Query(slow, "{{instance}}"), steps=rising(0.01),
    )  # fmt: skip
    board.lines(
        "By method, p99", "One call in a hundred takes longer; of a stream it is its life.", "s",
        Query(quantile(0.99, "grpc_server_handling_seconds", GRPC, "grpc_method"), "{{grpc_method}}"),
    )  # fmt: skip
    board.lines(
        "By server, p99", "One call that encodes in a hundred takes longer, server by server.", "s",
        Query(quantile(0.99, "encserve_answer_seconds", ENCODE, "instance"), "{{instance}}"),
        steps=rising(float(LATENCY_OBJECTIVE)),
    )  # fmt: skip
    board.lines(
        "Bulk", "Calls with the priority bulk, until the answer; the line is the bound of their objective.", "s",
        *quantiles("encserve_answer_seconds", f'priority="bulk", {INSTANCE}', of=(0.5, 0.99)),
        steps=rising(float(BULK_OBJECTIVE)),
    )  # fmt: skip
    board.lines(
        "Inspect", "The model's run for an inspection, quantiles by model; it has a lane of its own.", "s",
        *quantiles("encserve_stage_seconds", f'{MODEL}, stage="inspect"', "model", of=(0.5, 0.99)),
    )  # fmt: skip


def _breakdown(board: Board) -> None:
    board.row("Where the time goes")
    stages = "|".join(_STAGES)
    board.lines(
        "Mean by stage", "About what a request of one sequence waits for, stage by stage.", "s",
        Query(mean("encserve_stage_seconds", f'{MODEL}, stage=~"{stages}"', "stage"), "{{stage}}"),
        stacked=True, width=12,
    )  # fmt: skip
    board.lines(
        "p99 by stage", "One in a hundred takes longer; p99s of stages do not add up.", "s",
        Query(quantile(0.99, "encserve_stage_seconds", f'{MODEL}, stage=~"{stages}"', "stage"), "{{stage}}"), width=12,
    )  # fmt: skip
    board.heat(
        "Queue, all sequences", "How long sequences waited for their batch.", "s",
        "encserve_stage_seconds", f'{MODEL}, stage="queue"',
    )  # fmt: skip
    board.heat(
        "Compute, all batches", "How long the model ran on each batch.", "s",
        "encserve_stage_seconds", f'{MODEL}, stage="compute"',
    )  # fmt: skip
    board.heat(
        "Event loop, all ticks", "How late the event loop was; all calls wait for it.", "s",
        "encserve_event_loop_lag_seconds", INSTANCE,
    )  # fmt: skip

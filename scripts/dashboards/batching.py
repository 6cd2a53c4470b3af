"""Batching: is the device used well?"""

from dashboards.parts import MODEL, RATE, Board, Query, mean, quantile, quantiles, rate, rising
from grafana_foundation_sdk.models import dashboard as models

_COMPUTE = f'{MODEL}, stage="compute"'
_BUSY = rate("encserve_device_busy_seconds_total", MODEL, "model")


def build() -> models.Dashboard:
    """The dashboard."""
    board = Board(
        "batching", "Batching", "What batches hold, why they took no more, and what the device makes of them."
    )
    _batches(board)
    _device(board)
    _queue(board)
    return board.build()


def _batches(board: Board) -> None:
    board.row("Batches")
    board.lines(
        "Sequences of a batch", "More share one run of the model; a single caller has 1.", "short",
        Query(mean("encserve_batch_sequences", MODEL, "model"), "mean {{model}}"),
        Query(quantile(0.95, "encserve_batch_sequences", MODEL, "model"), "p95 {{model}}"),
    )  # fmt: skip
    board.heat(
        "Sequences, all batches", "How many batches held how many sequences.", "short",
        "encserve_batch_sequences", MODEL,
    )  # fmt: skip
    board.lines(
        "What closed the batch", "Why batches took no more: nothing else pending, token budget, count, padding.",
        "suffix: batches/s", Query(rate("encserve_batches_total", MODEL, "closed_by"), "{{closed_by}}"), stacked=True,
    )  # fmt: skip
    board.lines(
        "Tokens of a batch", "Without padding, and beside them the budget of padded tokens.", "suffix: tokens",
        Query(mean("encserve_batch_tokens", MODEL, "model"), "mean {{model}}"),
        Query(quantile(0.95, "encserve_batch_tokens", MODEL, "model"), "p95 {{model}}"),
        Query(f"max by (model) (encserve_batch_limit_tokens{{{MODEL}}})", "limit {{model}}"),
    )  # fmt: skip
    board.heat("Tokens, all batches", "How many batches held how many tokens.", "short", "encserve_batch_tokens", MODEL)
    padding, tokens = (rate(f"encserve_{name}_total", MODEL, "model") for name in ("padding_tokens", "tokens"))
    board.lines(
        "Padding", "The share of what was laid out that is no token; bounded by --max-padding-fraction.", "percentunit",
        Query(f"{padding} / ({padding} + {tokens})", "{{model}}"), steps=rising(0.25, 0.5), most=1,
    )  # fmt: skip


def _device(board: Board) -> None:
    board.row("Device")
    board.lines(
        "Busy", "The share of time in which at least one batch of the model ran, by server.", "percentunit",
        Query(rate("encserve_device_busy_seconds_total", MODEL, "model", "instance"), "{{model}} {{instance}}"),
        steps=rising(0.7, 0.9), most=1,
    )  # fmt: skip
    board.lines(
        "Side by side", "How many batches ran at once while any ran.", "short",
        Query(f"{rate('encserve_stage_seconds_sum', _COMPUTE, 'model')} / {_BUSY}", "{{model}}"),
    )  # fmt: skip
    board.lines(
        "Tokens a busy second", "What the device does while it is busy; times the idle share it is the room left.",
        "suffix: tokens/s", Query(f"{rate('encserve_tokens_total', MODEL, 'model')} / {_BUSY}", "{{model}}"),
    )  # fmt: skip
    board.lines(
        "Tokens", "Tokens run a second.", "suffix: tokens/s",
        Query(rate("encserve_tokens_total", MODEL, "model"), "{{model}}"), stacked=True,
    )  # fmt: skip
    board.lines(
        "Batches", "Batches run a second.", "suffix: batches/s",
        Query(rate("encserve_batches_total", MODEL, "model"), "{{model}}"), stacked=True,
    )  # fmt: skip
    board.lines(
        "Failed runs", "Runs a second in which the engine failed; a bad sequence makes a few, in halves.",
        "suffix: runs/s",
        Query(rate("encserve_failed_batches_total", MODEL, "model"), "{{model}}"), steps=rising(0.1),
    )  # fmt: skip


def _queue(board: Board) -> None:
    board.row("What waits")
    board.lines(
        "Requests and sequences", "Waiting for a batch.", "short",
        Query(f"sum by (model) (encserve_queue_requests{{{MODEL}}})", "requests {{model}}"),
        Query(f"sum by (model) (encserve_queue_sequences{{{MODEL}}})", "sequences {{model}}"),
    )  # fmt: skip
    board.lines(
        "Tokens waiting", "And the most that may, of all servers.", "suffix: tokens",
        Query(f"sum by (model) (encserve_queue_tokens{{{MODEL}}})", "waiting {{model}}"),
        Query(f"sum by (model) (encserve_queue_bulk_tokens{{{MODEL}}})", "bulk of that {{model}}"),
        Query(f"sum by (model) (encserve_queue_limit_tokens{{{MODEL}}})", "limit {{model}}"),
    )  # fmt: skip
    board.lines(
        "Text waiting", "For the tokenizer or in it, and the most that may.", "bytes",
        Query(f"sum by (model) (encserve_queue_text_bytes{{{MODEL}}})", "waiting {{model}}"),
        Query(f"sum by (model) (encserve_queue_limit_text_bytes{{{MODEL}}})", "limit {{model}}"),
    )  # fmt: skip
    board.lines(
        "Time in the queue", "Until a sequence's batch begins.", "s",
        *quantiles("encserve_stage_seconds", f'{MODEL}, stage="queue"', "model", of=(0.5, 0.99)), width=12,
    )  # fmt: skip
    board.lines(
        "Never computed", "Sequences a second whose deadline passed or whose caller went before they ran.",
        "suffix: sequences/s",
        Query(f"sum by (model) (rate(encserve_expired_total{{{MODEL}}}{RATE}))", "expired {{model}}"),
        Query(rate("encserve_cancelled_total", f'{MODEL}, stage="queued"', "model"), "cancelled {{model}}"),
        stacked=True, width=12,
    )  # fmt: skip

"""Service: is it well, for those who call it? Everything else is a reason why not."""

from dashboards.parts import (
    ENCODE,
    FAILED,
    GRPC,
    INSTANCE,
    LATENCY_OBJECTIVE,
    MODEL,
    RATE,
    Board,
    Query,
    falling,
    quantiles,
    rate,
    rising,
)
from grafana_foundation_sdk.models import dashboard as models

_OBJECTIVE_S = float(LATENCY_OBJECTIVE)


def build() -> models.Dashboard:
    """The dashboard."""
    board = Board("service", "Service", "Traffic, errors and latency against objectives, and how near the limits are.")
    _objectives(board)
    _traffic(board)
    _saturation(board)
    return board.build()


def _budget(what: str, of: str, budget: str) -> str:
    """How much of a budget is left over 30 days."""
    failed = f"sum(increase(instance:encserve_{what}:total{{{INSTANCE}}}[30d]))"
    return (
        f"1 - ({failed} / sum(increase(instance:encserve_{of}:total{{{INSTANCE}}}[30d]))) "
        f"/ scalar(encserve:{budget}_budget:ratio)"
    )


def _burn(what: str, of: str, budget: str) -> str:
    """How many times as fast as allowed a budget was used up in the last hour."""
    return (
        f"sum(rate(instance:encserve_{what}:total{{{INSTANCE}}}[1h])) "
        f"/ sum(rate(instance:encserve_{of}:total{{{INSTANCE}}}[1h])) / scalar(encserve:{budget}_budget:ratio)"
    )


def _objectives(board: Board) -> None:
    board.row("Objectives")
    board.number(
        "Error budget left", "What is left of the failures that 30 days may have.", "percentunit",
        Query(_budget("calls_failed", "calls", "error")), falling(0, 0.25), width=3, decimals=1, course=False,
    )  # fmt: skip
    board.number(
        "Latency budget left", "What is left of the slow calls that 30 days may have.", "percentunit",
        Query(_budget("calls_slow", "calls_timed", "latency")), falling(0, 0.25), width=3, decimals=1, course=False,
    )  # fmt: skip
    board.number(
        "Error burn", "Failures in the last hour, as a multiple of what the objective allows; 14.4 wakes somebody.",
        "suffix: ×", Query(_burn("calls_failed", "calls", "error")), rising(1, 14.4), width=3, decimals=1,
    )  # fmt: skip
    board.number(
        "Latency burn", "Slow calls in the last hour, as a multiple of what the objective allows.", "suffix: ×",
        Query(_burn("calls_slow", "calls_timed", "latency")), rising(1, 14.4), width=3, decimals=1,
    )  # fmt: skip
    board.number(
        "Firing alerts", "Alerts of encserve that fire now.", "short",
        Query('count(ALERTS{alertname=~"Encserve.+", alertstate="firing"}) or vector(0)'), rising(1), width=3,
    )  # fmt: skip
    board.number(
        "Servers up", "Servers that answer Prometheus.", "short",
        Query(f'sum(up{{job="encserve", {INSTANCE}}})'), falling(1), width=3,
    )  # fmt: skip
    board.number(
        "Models ready", "The share of models, over all servers, that answer requests.", "percentunit",
        Query(f"avg(encserve_ready{{{MODEL}}})"), falling(1), width=3,
    )  # fmt: skip
    board.number(
        "Fullest queue", "How full the fullest queue of any model is; what does not fit is refused.", "percentunit",
        Query(f"max(model:encserve_queue_fill:ratio{{{MODEL}}})"), rising(0.5, 0.8), width=3,
    )  # fmt: skip


def _traffic(board: Board) -> None:
    board.row("Traffic, errors, latency")
    board.lines(
        "Calls", "Calls begun a second, by method; a stream counts once.", "reqps",
        Query(rate("grpc_server_started_total", GRPC, "grpc_method"), "{{grpc_method}}"), stacked=True,
    )  # fmt: skip
    board.lines(
        "Outcomes", "Calls ended a second, by status code.", "reqps",
        Query(f"{rate('grpc_server_handled_total', GRPC, 'grpc_code')} > 0", "{{grpc_code}}"), stacked=True,
    )  # fmt: skip
    board.lines(
        "Failed calls", "The share of RPCs that the server failed, refusals left out; the line is the objective.",
        "percentunit",
        Query(
            f"{rate('grpc_server_handled_total', f'{GRPC}, {FAILED}', 'grpc_method')} "
            f"/ {rate('grpc_server_handled_total', GRPC, 'grpc_method')}", "{{grpc_method}}",
        ), steps=rising(0.001),
    )  # fmt: skip
    board.lines(
        "Encode latency", "All protocols, without bulk, until the answer; the line is the objective's bound.", "s",
        *quantiles("encserve_answer_seconds", ENCODE),
        steps=rising(_OBJECTIVE_S),
    )  # fmt: skip
    board.lines(
        "HTTP", "Requests over HTTP answered a second, by route and status; 499 is a caller that went away.", "reqps",
        Query(f"{rate('encserve_http_requests_total', INSTANCE, 'route', 'status')} > 0", "{{route}} {{status}}"),
        stacked=True,
    )  # fmt: skip
    board.lines(
        "HTTP latency", "From the head of a request to its answer, by route; the line is the objective's bound.", "s",
        *quantiles("encserve_http_request_seconds", INSTANCE, "route", of=(0.5, 0.99)), steps=rising(_OBJECTIVE_S),
    )  # fmt: skip
    board.lines(
        "Tokens", "Tokens run a second, by model.", "suffix: tokens/s",
        Query(rate("encserve_tokens_total", MODEL, "model"), "{{model}}"), stacked=True,
    )  # fmt: skip
    board.lines(
        "Replies", "Bytes of replies a second, by model.", "Bps",
        Query(rate("encserve_response_bytes_sum", MODEL, "model"), "{{model}}"), stacked=True,
    )  # fmt: skip


def _saturation(board: Board) -> None:
    board.row("Saturation")
    board.lines(
        "Queues", "How full each queue is; what does not fit is refused.", "percentunit",
        Query(f"max by (model, queue) (model:encserve_queue_fill:ratio{{{MODEL}}})", "{{model}} {{queue}}"),
        steps=rising(0.5, 0.8), most=1,
    )  # fmt: skip
    board.lines(
        "Refusals", "Requests answered with an error of ours a second, by reason; requests in streams too.", "reqps",
        Query(f"{rate('encserve_refused_total', INSTANCE, 'reason')} > 0", "{{reason}}"), stacked=True,
    )  # fmt: skip
    board.lines(
        "In flight", "Calls being worked on, by server; a stream counts once.", "short",
        Query(f"sum by (instance) (encserve_in_flight_requests{{{INSTANCE}}})", "{{instance}}"), stacked=True,
    )  # fmt: skip
    board.lines(
        "Busy", "The share of time in which at least one batch of the model ran; at 1 only more servers help.",
        "percentunit",
        Query(rate("encserve_device_busy_seconds_total", MODEL, "model", "instance"), "{{model}} {{instance}}"),
        steps=rising(0.7, 0.9), most=1,
    )  # fmt: skip
    board.lines(
        "Event loop", "How late the event loop is: the median and the latest of a hundred.", "s",
        *quantiles("encserve_event_loop_lag_seconds", INSTANCE, "instance", of=(0.5, 0.99)), steps=rising(0.1),
    )  # fmt: skip
    board.lines(
        "Given up", "Sequences a second whose caller went away or whose deadline passed, by when.",
        "suffix: sequences/s",
        Query(rate("encserve_cancelled_total", MODEL, "stage"), "cancelled while {{stage}}"),
        Query(f"sum(rate(encserve_expired_total{{{MODEL}}}{RATE}))", "expired in the queue"), stacked=True,
    )  # fmt: skip

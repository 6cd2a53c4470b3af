"""Models and process: what is served by what, and how the process is."""

from dashboards.parts import INSTANCE, MODEL, RATE, Board, Query, quantiles, rate, rising
from grafana_foundation_sdk.models import dashboard as models

_PROCESS = f'job="encserve", {INSTANCE}'


def build() -> models.Dashboard:
    """The dashboard."""
    board = Board("models", "Models and process", "Versions, providers, memory, CPU, event loop, GPUs.")
    _models(board)
    _process(board)
    _gpus(board)
    return board.build()


def _models(board: Board) -> None:
    board.row("Models")
    board.rows(
        "What is served", "Every model and version on every server, what it runs on and what was asked for.",
        Query(f"encserve_model_info{{{MODEL}}}"),
        {
            "instance": "Instance", "model": "Model", "version": "Version", "precision": "Precision",
            "provider": "Provider", "device": "Device", "requested_device": "Asked for", "runtime": "Runtime",
            "fingerprint": "Fingerprint",
        },
    )  # fmt: skip
    board.states(
        "Ready", "Whether each model answers requests.",
        Query(f"encserve_ready{{{MODEL}}}", "{{model}}@{{version}} {{instance}}"),
        {"0": ("not ready", "red"), "1": ("ready", "green")},
    )  # fmt: skip
    board.states(
        "Default version", "Which version requests get that name none.",
        Query(f"encserve_model_default{{{MODEL}}}", "{{model}}@{{version}} {{instance}}"),
        {"0": ("loaded", "blue"), "1": ("default", "green")},
    )  # fmt: skip
    board.lines(
        "Loads", "Bundles loaded and refused in the last 10 minutes; what was served before is served on.", "short",
        Query(
            f"sum by (model, outcome) (increase(encserve_model_loads_total{{{MODEL}}}[10m]))", "{{model}} {{outcome}}"
        ),
    )  # fmt: skip
    board.lines(
        "Time to load", "To verify and load a model, and to warm it up.", "s",
        Query(f"max by (model, version) (encserve_model_load_seconds{{{MODEL}}})", "load {{model}}@{{version}}"),
        Query(f"max by (model, version) (encserve_model_warmup_seconds{{{MODEL}}})", "warm up {{model}}@{{version}}"),
    )  # fmt: skip
    board.lines(
        "Inspections", "Waiting, running, or being sent, and the most that may.", "short",
        Query(f"sum by (model) (encserve_inspections{{{MODEL}}})", "{{model}}"),
        Query(f"sum by (model) (encserve_inspections_limit{{{MODEL}}})", "limit {{model}}"),
    )  # fmt: skip


def _process(board: Board) -> None:
    board.row("Process")
    board.rows(
        "Servers", "The server's version on each instance.", Query(f"encserve_build_info{{{INSTANCE}}}"),
        {"instance": "Instance", "version": "Version"}, width=12,
    )  # fmt: skip
    board.lines(
        "Uptime", "Since the process started; a saw is a server that starts again and again.", "s",
        Query(f"time() - process_start_time_seconds{{{_PROCESS}}}", "{{instance}}"), width=12,
    )  # fmt: skip
    board.lines(
        "Memory", "Resident memory of the process, weights included as far as they are in memory.", "bytes",
        Query(f"process_resident_memory_bytes{{{_PROCESS}}}", "{{instance}}"),
    )  # fmt: skip
    board.lines(
        "CPU", "CPUs in use by the process.", "suffix: CPUs",
        Query(f"rate(process_cpu_seconds_total{{{_PROCESS}}}{RATE})", "{{instance}}"),
    )  # fmt: skip
    board.lines(
        "File descriptors", "The share of those it may have; each connection takes one.", "percentunit",
        Query(f"process_open_fds{{{_PROCESS}}} / process_max_fds{{{_PROCESS}}}", "{{instance}}"),
        steps=rising(0.5, 0.8),
    )  # fmt: skip
    board.lines(
        "Event loop", "How late the event loop is; above 0.1 s everybody notices.", "s",
        *quantiles("encserve_event_loop_lag_seconds", INSTANCE, "instance"), steps=rising(0.1),
    )  # fmt: skip
    board.lines(
        "Garbage collections", "Python's, a second, by generation; the oldest stops everything for longest.", "ops",
        Query(rate("python_gc_collections_total", _PROCESS, "instance", "generation"), "{{instance}} {{generation}}"),
    )  # fmt: skip
    board.lines(
        "Metrics page", "How long Prometheus waits for it, network included.", "s",
        Query(f"scrape_duration_seconds{{{_PROCESS}}}", "{{instance}}"), steps=rising(0.1),
    )  # fmt: skip


def _gpus(board: Board) -> None:
    board.row("GPUs", collapsed=True)
    used, total = (f"encserve_gpu_memory_{name}_bytes{{{INSTANCE}}}" for name in ("used", "total"))
    board.lines(
        "GPU memory", "In use on each GPU, by whatever process, and what it has.", "bytes",
        Query(used, "used {{instance}} {{gpu}}"), Query(total, "total {{instance}} {{gpu}}"), width=12,
    )  # fmt: skip
    board.lines(
        "GPU memory, share", "A model that does not fit is refused when it is loaded.", "percentunit",
        Query(f"{used} / {total}", "{{instance}} {{gpu}}"), steps=rising(0.8, 0.95), most=1, width=12,
    )  # fmt: skip
